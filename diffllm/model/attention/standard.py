"""Softmax attention with grouped queries (Vaswani et al., arXiv 1706.03762; 2305.13245)."""

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from diffllm.errors import ConfigError
from diffllm.model.attention.base import Attention, AttentionConfig, Shown
from diffllm.model.attention.ops import attend
from diffllm.model.config import ModelConfig
from diffllm.model.init import Initializer
from diffllm.registry import schema


class Sink(Enum):
    """What the softmax denominator holds besides the keys.

    learned: exp(s) with one logit s a head (gpt-oss; attention sinks, arXiv 2309.17453).
    one: 1 (off-by-one softmax, Miller 2023).
    """

    none = "none"
    learned = "learned"
    one = "one"


@schema(group="attention", name="standard", package="model.attention")
@dataclass
class StandardConfig(AttentionConfig):
    query_heads: float = 1.0
    """Query heads over the baseline's."""
    sink: Sink = Sink.none

    def build(self, model: ModelConfig, layer_idx: int) -> "StandardAttention":
        return StandardAttention(model, self)

    def validate(self, model: ModelConfig) -> None:
        heads = self.query_heads * model.n_heads
        if heads != round(heads) or heads < 1 or round(heads) % model.n_kv_heads:
            raise ConfigError(
                f"model.attention.query_heads={self.query_heads} times "
                f"model.n_heads={model.n_heads} must be a multiple of "
                f"model.n_kv_heads={model.n_kv_heads}"
            )


class StandardAttention(Attention):
    """context = softmax(q k) v, optionally with a sink in the denominator."""

    def __init__(self, model: ModelConfig, cfg: StandardConfig):
        super().__init__(model, n_query_heads=round(cfg.query_heads * model.n_heads))
        self.sink_kind = cfg.sink
        if cfg.sink is Sink.learned:
            self.sink = nn.Parameter(torch.empty(self.n_query_heads))

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, show: Shown | None
    ) -> Tensor:
        if self.sink_kind is Sink.none:
            return attend(q, k, v, mask)
        return attend_with_sink(q, k, v, self.sink if self.sink_kind is Sink.learned else None)

    def reset_parameters(self, init: Initializer, std: float, out_std: float) -> None:
        super().reset_parameters(init, std, out_std)
        if self.sink_kind is Sink.learned:
            init.constant_(self.sink, 0.0)


def attend_with_sink(q: Tensor, k: Tensor, v: Tensor, logit: Tensor | None) -> Tensor:
    """Causal attention whose denominator also holds exp(logit), 1 without one.

    The sink is a key in front of all others whose value is zero, so any kernel computes it and its
    gradient. A key of zeros has logit 0. For a learned logit, q and k get one more channel that
    multiplies to it for the sink and to nothing for the others. A query in front keeps the causal
    mask square.

    Args:
        q: (B, T, H, d). k: (B, S, K, d). v: (B, S, K, dv). logit: (H,) or None.
    """
    d = q.shape[-1]
    q, k, v = (torch.cat((torch.zeros_like(t[:, :1]), t), dim=1) for t in (q, k, v))
    if logit is not None:
        channels = 8  # kernels want widths in multiples of 8
        scaled = (logit * math.sqrt(d)).to(q.dtype).view(1, 1, -1, 1).expand(*q.shape[:3], 1)
        rest = q.new_zeros(*q.shape[:3], channels - 1)
        q = torch.cat((q, scaled, rest), dim=-1)
        marks = k.new_zeros(*k.shape[:3], channels)
        marks[:, 0, :, 0] = 1
        k = torch.cat((k, marks), dim=-1)
    return attend(q, k, v, scale=d**-0.5)[:, 1:]
