"""The layout that a decoder gets where several fit."""

from collections.abc import Callable, Sequence

from diffllm.checkpoint.hf.layout import Layout
from diffllm.checkpoint.hf.llama import diffllama_layout, llama_layout, qwen3_moe_layout
from diffllm.checkpoint.hf.own import own_layout
from diffllm.core.errors import ConfigError
from diffllm.model.config import ModelConfig

KNOWN: Sequence[Callable[[ModelConfig], Layout | None]] = (
    llama_layout, qwen3_moe_layout, diffllama_layout,
)  # fmt: skip
"""Layouts that transformers has classes for."""


def layout_of(model: ModelConfig, own: bool = False) -> Layout:
    """Choose the layout that most tools know, or that of our own modelling file; raises ConfigError
    for a variant of a plugin's, which no modelling file has."""
    choices = [own_layout] if own else [*KNOWN, own_layout]
    for layout in choices:
        if found := layout(model):
            return found
    raise ConfigError(
        f"{type(model.attention).__name__} is a plugin's: no modelling file computes it, so it "
        "cannot be exported"
    )
