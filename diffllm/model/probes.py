"""Numbers from explicit maps at a few query positions.

Shapes: B batch, T tokens, N probed positions, h heads of the variant (V1 has n_heads / 2).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from diffllm.model.attention.base import Attention, Shown
from diffllm.model.attention.ops import attention_scores
from diffllm.model.documents import Documents


class Probe(NamedTuple):
    """The query positions to look at, and what they see."""

    positions: Tensor
    """Query positions, the same in every row: (N,) int64."""
    visible: Tensor
    """Keys that each query may see: (B or 1, 1, N, T) boolean."""


def probe_at(positions: Tensor, length: int, documents: Documents | None) -> Probe:
    """Build a probe of the queries at `positions` (N,) in rows of `length` tokens."""
    keys = torch.arange(length, device=positions.device)
    visible = (keys <= positions[:, None])[None, None]
    if documents is not None:
        same = documents.ids[:, positions, None] == documents.ids[:, None, :]
        visible = visible & same[:, None]
    return Probe(positions, visible)


@torch.no_grad()
def probe_stats(attention: Attention, x: Tensor, show: Shown, probe: Probe) -> dict[str, Tensor]:
    """Measure one layer's maps at probed positions, float32: scalars, and `lambda_head` (h,).

    attn_logit_top1: largest q k / sqrt(d) over visible keys. attn_entropy: of the softmax maps,
    in nats; a sink's share is left out. sink_mass: weight of the effective, signed map on the
    first token that the query sees, its document's; a document's first token sees itself alone.
    attn_negative_share: magnitude of the effective map's negative weights over that of all.
    lambda_head: mean over all tokens; absent where lambda does not depend on the head.
    The others are means over sequences, heads and probed positions. Where the maps of a pair
    weight different values (`attention.maps_note`), their difference is still what is measured.
    The layer read x (B, T, D).
    """
    x, q, k = x[:, probe.positions], show["q"][:, probe.positions], show["k"]
    scores = attention_scores(q, k).masked_fill(~probe.visible, float("-inf"))
    *parts, effective = attention.maps(x, q, k, probe.visible).values()
    first = probe.visible.int().argmax(-1, keepdim=True).expand(*effective.shape[:3], 1)
    stats = {
        "attn_logit_top1": scores.amax(),
        "attn_entropy": torch.stack([entropy(p).mean() for p in parts or [effective]]).mean(),
        "attn_negative_share": negative_share(effective).mean(),
        "sink_mass": effective.gather(-1, first).mean(),
    }
    lam = show.get("lambda")
    if lam is not None and lam.ndim == 3 and lam.shape[-1] == effective.shape[1]:
        stats["lambda_head"] = lam.mean((0, 1))
    return {name: value.float() for name, value in stats.items()}


def entropy(weights: Tensor) -> Tensor:
    """Compute the entropy of each query's distribution over the keys, in nats: (..., S) -> (...).

    What a sink keeps is left out; 0 where it keeps everything.
    """
    total = weights.sum(-1, keepdim=True)
    return torch.special.entr(weights / torch.where(total > 0, total, 1)).sum(-1)


def negative_share(weights: Tensor) -> Tensor:
    """Compute each query's share of negative weights in the sum of |weights|: (..., S) -> (...)."""
    total = weights.abs().sum(-1)
    return weights.clamp_max(0).abs().sum(-1) / torch.where(total > 0, total, 1)
