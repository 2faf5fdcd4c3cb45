"""Single-device model code: the decoder, its attention variants and feed-forward layers."""

from diffllm.model.attention import discover
from diffllm.model.config import ModelConfig
from diffllm.model.transformer import Transformer, build_model, without_storage

discover()

__all__ = ["ModelConfig", "Transformer", "build_model", "without_storage"]
