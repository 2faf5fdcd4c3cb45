"""Feed-forward layers."""

from diffllm.model.ffn.config import MoEConfig
from diffllm.model.ffn.moe import MoE, Routed
from diffllm.model.ffn.swiglu import SwiGLU

__all__ = ["MoE", "MoEConfig", "Routed", "SwiGLU"]
