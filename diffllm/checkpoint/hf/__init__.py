"""Our decoders as other libraries lay them out: configs, names and shapes of tensors, files."""

from diffllm.checkpoint.hf.conversion import converted
from diffllm.checkpoint.hf.layout import Layout, Mapped, layout_of
from diffllm.checkpoint.hf.model_directory import ModelDirectory

__all__ = ["Layout", "Mapped", "ModelDirectory", "converted", "layout_of"]
