"""Feed-forward layers."""

from diffllm.model.ffn.swiglu import SwiGLU

__all__ = ["SwiGLU"]
