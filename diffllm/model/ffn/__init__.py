"""Feed-forward layers."""

from diffllm.model.ffn.moe import MoE, Routed, SwiGLU
from diffllm.model.ffn.router import MoEConfig

__all__ = ["MoE", "MoEConfig", "Routed", "SwiGLU"]
