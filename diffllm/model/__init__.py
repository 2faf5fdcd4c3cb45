"""Single-device model code: the decoder, its attention variants and feed-forward layers."""

import importlib
import pkgutil

from diffllm.model import attention
from diffllm.model.config import ModelConfig
from diffllm.model.transformer import Transformer, build_model, without_storage

for _module in pkgutil.iter_modules(attention.__path__):
    importlib.import_module(f"{attention.__name__}.{_module.name}")  # registers its config

__all__ = ["ModelConfig", "Transformer", "build_model", "without_storage"]
