"""Softmax attention with grouped queries (Vaswani et al., arXiv 1706.03762; 2305.13245)."""

from dataclasses import dataclass

from torch import Tensor

from diffllm.model.attention.base import Attention, AttentionConfig, Shown
from diffllm.model.attention.ops import attend
from diffllm.model.config import ModelConfig
from diffllm.registry import schema


@schema(group="attention", name="standard", package="model.attention")
@dataclass
class StandardConfig(AttentionConfig):
    """The baseline; nothing to configure."""

    def build(self, model: ModelConfig, layer_idx: int) -> "StandardAttention":
        return StandardAttention(model)


class StandardAttention(Attention):
    """context = softmax(q k) v."""

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, show: Shown | None
    ) -> Tensor:
        return attend(q, k, v, mask)
