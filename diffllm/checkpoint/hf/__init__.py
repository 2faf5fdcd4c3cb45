"""Our decoders as other libraries lay them out: configs, names and shapes of tensors, files."""

from diffllm.checkpoint.hf.choice import layout_of
from diffllm.checkpoint.hf.conversion import converted
from diffllm.checkpoint.hf.directory import ModelDirectory
from diffllm.checkpoint.hf.layout import Layout, Mapped

__all__ = ["Layout", "Mapped", "ModelDirectory", "converted", "layout_of"]
