"""Our decoders as other libraries lay them out: configs, names and shapes of tensors, files."""

from diffllm.layouts.choice import layout_of
from diffllm.layouts.conversion import converted
from diffllm.layouts.directory import ModelDirectory
from diffllm.layouts.layout import Layout, Mapped

__all__ = ["Layout", "Mapped", "ModelDirectory", "converted", "layout_of"]
