"""Softmax attention (arXiv 1706.03762) with grouped queries (arXiv 2305.13245)."""

import math
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.core.errors import ConfigError
from diffllm.core.keys import key
from diffllm.core.registry import schema
from diffllm.model.attention.base import Attention, AttentionConfig, Aux, Maps
from diffllm.model.attention.kernels import Resolved
from diffllm.model.attention.masks import Mask, Sliced, WholeMask
from diffllm.model.attention.ops import Backend, attend, attention_weights
from diffllm.model.config import ModelConfig
from diffllm.model.init import Initializer

SINK_CHANNELS = 8
"""Additional channels of q and k for a learned sink; kernels need multiples of 8."""


class Sink(Enum):
    """Attention sink, an additional term in the softmax denominator.

    none: no additional term.
    learned: exp(s) with a learned logit s per head (gpt-oss; attention sinks, arXiv 2309.17453).
    one: the constant 1 (off-by-one softmax, Miller 2023).
    """

    none = "none"
    learned = "learned"
    one = "one"


@schema(group="attention", name="standard", package="model.attention")
@dataclass
class StandardConfig(AttentionConfig):
    """Settings of standard softmax attention, the baseline."""

    query_heads: float = key(
        1.0, above=0, most=64, effect="numbers", help="Number of query heads divided by `n_heads`."
    )
    sink: Sink = key(
        Sink.none,
        effect="numbers",
        help="Additional term in the softmax denominator: none, a learned logit per head, or 1.",
    )

    def build(self, model: ModelConfig, layer_idx: int) -> "StandardAttention":
        return StandardAttention(model, self)

    def resolve(self, model: ModelConfig, device: torch.device) -> Resolved:
        width = model.head_dim
        if self.sink is Sink.learned:
            width += SINK_CHANNELS
        return Resolved(self, device, width, explicit_mask=self.sink is not Sink.none)

    def validate(self, model: ModelConfig) -> None:
        heads = self.query_heads * model.n_heads
        if heads != round(heads) or round(heads) % model.n_kv_heads:
            raise ConfigError(
                f"model.attention.query_heads={self.query_heads} times "
                f"model.n_heads={model.n_heads} gives {heads:g} query heads, but the number must "
                f"be a multiple of model.n_kv_heads={model.n_kv_heads}; choose another "
                "model.attention.query_heads"
            )
        if self.sink is not Sink.none and self.backend is Backend.flex:
            raise ConfigError(
                f"model.attention.backend=flex does not support "
                f"model.attention.sink={self.sink.name}; choose backend sdpa, flash or reference"
            )


class StandardAttention(Attention):
    """Standard attention, softmax(q k / sqrt(d)) v, optionally with an attention sink."""

    def __init__(self, model: ModelConfig, cfg: StandardConfig):
        super().__init__(model, n_query_heads=round(cfg.query_heads * model.n_heads))
        self.sink_kind = cfg.sink
        learned = cfg.sink is Sink.learned
        self.sink = nn.Parameter(torch.empty(self.n_query_heads)) if learned else None
        """Logit of the sink per head, (H,); None without a learned sink."""

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, aux: Aux | None
    ) -> Tensor:
        if self.sink_kind is Sink.none:
            return self.attend(q, k, v, mask)
        if isinstance(mask, Sliced):
            heads = mask.slices.heads(q.shape[2], k.shape[2], v.shape[2])
            sink = None if self.sink is None else self.sink[heads]
            kernel = partial(self.with_sink, mask=mask.mask, sink=sink)
            return mask.slices.around(kernel, q, k, v)
        return self.with_sink(q, k, v, mask, self.sink)

    def with_sink(
        self, q: Tensor, k: Tensor, v: Tensor, mask: WholeMask, sink: Tensor | None
    ) -> Tensor:
        """Compute attention with a sink; `sink` contains the logits of a learned sink, (H,)."""
        assert mask is None or isinstance(mask, Tensor)
        n_queries = q.shape[1]
        q, k, v, mask, scale = with_sink(q, k, v, mask, sink)
        context = attend(q, k, v, mask, self.backend, scale)
        # Drop the additional first query, if any.
        return context[:, -n_queries:]

    def maps(self, x: Tensor, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Maps:
        """Return {"map": attention map (B, H, T, S)}; with a sink, each row sums to less than 1."""
        if self.sink_kind is Sink.none:
            return super().maps(x, q, k, mask)
        q, k, _, mask, scale = with_sink(q, k, k, mask, self.sink)
        weights = attention_weights(q, k, mask, scale)
        n_queries = x.shape[1]
        # Drop the additional first query, if any, and the sink key.
        return {"map": weights[:, :, -n_queries:, 1:]}

    def reset_parameters(self, init: Initializer) -> None:
        if self.sink is not None:
            init.constant_(self.sink, 0.0)


def with_sink(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, logit: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
    """Return arguments for `attend` that add an attention sink to the attention of q, k and v.

    The sink adds exp(logit), or 1 if `logit` is None, to the softmax denominator. The sink is an
    additional first key whose value is zero. If `logit` is given, q and k get 8 more channels. The
    scaled product of these channels is the logit for the sink key, and 0 for all other keys.

    Args:
        q: (B, T, H, d). k: (B, S, K, d). v: (B, S, K, dv).
        mask: boolean, broadcastable to (B, H, T, S), or None for a causal mask.
        logit: logit of the sink per head, (H,), or None.

    Returns:
        q, k, v, mask and the scale 1 / sqrt(d). k and v have S + 1 keys. If T = S or a mask is
        given, q and the mask have an additional first query, whose output the caller must drop.
    """
    d = q.shape[-1]
    # If T = S, an additional query keeps T = S, so that kernels still apply their causal mask.
    if mask is not None or q.shape[1] == k.shape[1]:
        q = prepend_zeros(q)
    k = prepend_zeros(k)
    v = prepend_zeros(v)
    if mask is not None:
        mask = F.pad(mask, (1, 0, 1, 0), value=True)
    if logit is not None:
        # The kernel multiplies by 1 / sqrt(d), so multiply the logit by sqrt(d).
        scaled = (logit * math.sqrt(d)).to(q.dtype)
        scaled = scaled.view(1, 1, -1, 1)
        scaled = scaled.expand(*q.shape[:3], 1)
        padding = q.new_zeros(*q.shape[:3], SINK_CHANNELS - 1)
        q = torch.cat((q, scaled, padding), dim=-1)
        # Only the sink key selects the logit, which is the first additional channel of a query.
        marks = k.new_zeros(*k.shape[:3], SINK_CHANNELS)
        marks[:, 0, :, 0] = 1
        k = torch.cat((k, marks), dim=-1)
    return q, k, v, mask, d**-0.5


def prepend_zeros(heads: Tensor) -> Tensor:
    zeros = torch.zeros_like(heads[:, :1])
    return torch.cat((zeros, heads), dim=1)
