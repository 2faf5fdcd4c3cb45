"""Statistics of decoder blocks and attention maps, and the groups of parameters in metrics.

diffllm/metrics/table.py defines how values of several ranks and micro-batches are combined.

Shapes: B batch, T tokens, N query positions, h heads of the variant (V1 has n_heads / 2).
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from diffllm.model.attention.base import Attention, Aux
from diffllm.model.attention.ops import Documents, attention_scores

BlockStats = dict[str, Tensor]
ATTENTION_COMPONENTS = ("wq", "wk", "wv", "wo", "lambda/gate", "head norms")
OTHER_COMPONENTS = ("ffn", "router", "norms", "embeddings/output")
GROUPS = ("embedding", "attention", "lambda", "ffn", "norm", "router", "output")


def block_stats(x: Tensor, aux: Aux | None) -> BlockStats:
    """Compute scalar statistics, such as "context_rms", of a decoder block with output x (B, T, D).

    Returns float32 tensors by name, or {} if `aux` is None. `aux` contains diagnostic tensors:

    - "context" (B, T, heads, width): input of `wo`. "v" (B, T, K, width): attention values.
    - "residual", "attn_write", "ffn_write" (B, T, D): block input, attention and FFN outputs.
    - "lambda" (factor on the second map) and "gate": only in some variants.
    - "router" (B * T, E): expert scores scaled to sum 1 per token, only in MoE layers.
    """
    if aux is None:
        return {}
    with torch.no_grad():
        stats = {"hidden_top1": x.abs().amax().float(), "hidden_kurtosis": kurtosis(x)}
        rms = over_channels(aux["context"])
        stats |= {"context_rms": rms.mean(), **extremes("context_rms", rms)}
        if "v" in aux:
            ratio = rms / values_rms(aux["v"])
            stats |= {"context_over_value_rms": ratio.mean()}
            stats |= extremes("context_over_value_rms", ratio)
        if "lambda" in aux:
            lam = aux["lambda"].float()
            stats |= {"lambda_mean": lam.mean(), **extremes("lambda", lam)}
        if "gate" in aux:
            stats["gate_mean"] = aux["gate"].float().mean()
        if "router" in aux:
            stats["router_entropy"] = torch.special.entr(aux["router"]).sum(-1).mean()
        for name in ("residual", "attn_write", "ffn_write"):
            if name in aux:
                stats[f"{name}_rms"] = aux[name].float().square().mean().sqrt()
    return stats


def over_channels(x: Tensor) -> Tensor:
    return x.float().square().mean(-1).sqrt()


def values_rms(v: Tensor) -> Tensor:
    """Compute the RMS of the attention values v (B, T, K, width) of each sequence: (B, 1, 1)."""
    return v.float().square().mean((1, 2, 3)).sqrt().clamp_min(1e-30)[:, None, None]


def extremes(name: str, values: Tensor) -> BlockStats:
    return {f"{name}_min": values.amin(), f"{name}_max": values.amax()}


def kurtosis(x: Tensor) -> Tensor:
    """Compute the kurtosis of x along the last dimension (3 if normal), averaged over vectors."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    squares = centred.square()
    variance = squares.mean(-1)
    return (squares.square().mean(-1) / variance.square().clamp_min(1e-30)).mean()


def stack_stats(layers: list[BlockStats]) -> BlockStats:
    """Stack each statistic into one tensor over all layers that have this statistic."""
    return {
        name: torch.stack([stats[name] for stats in layers if name in stats]) for name in layers[-1]
    }


class Probe(NamedTuple):
    """Query positions at which attention maps are measured, and the keys visible to each query."""

    positions: Tensor
    """Query positions, the same in all rows: (N,) int64."""
    visible: Tensor
    """Keys visible to each query: (B or 1, 1, N, T) boolean."""


def probe_at(positions: Tensor, length: int, documents: Documents | None) -> Probe:
    """Find the keys that queries at `positions` (N,) see, in sequences of `length` tokens.

    If `documents` is given, queries see only keys of the same document.
    """
    keys = torch.arange(length, device=positions.device)
    visible = (keys <= positions[:, None])[None, None]
    if documents is not None:
        same = documents.ids[:, positions, None] == documents.ids[:, None, :]
        visible = visible & same[:, None]
    return Probe(positions, visible)


@torch.no_grad()
def probe_stats(attention: Attention, x: Tensor, aux: Aux, probe: Probe) -> BlockStats:
    """Measure the attention maps of one layer at the query positions of `probe`.

    `x` (B, T, D) is the input of attention; `aux` contains queries "q" and keys "k". The effective
    map is the last result of `attention.maps`, for example the difference of two maps. Returns
    float32 tensors by name:

    - attn_logit_top1: maximum of q k / sqrt(d) over all heads, query positions and visible keys.
    - attn_entropy: entropy in nats of the softmax maps, after scaling to sum 1; mean over maps.
    - sink_mass: weight of the first token that a query sees, in the effective map; may be negative.
    - attn_negative_share: sum of |negative weights| of the effective map / sum of |weights|.
    - lambda_head (h,): mean lambda of each head over tokens, only if lambda depends on the head.

    Entropy, sink mass and negative share are means over sequences, heads and query positions.
    """
    x, q, k = x[:, probe.positions], aux["q"][:, probe.positions], aux["k"]
    scores = attention_scores(q, k).masked_fill(~probe.visible, float("-inf"))
    *parts, effective = attention.maps(x, q, k, probe.visible).values()
    first = probe.visible.int().argmax(-1, keepdim=True).expand(*effective.shape[:3], 1)
    stats = {
        "attn_logit_top1": scores.amax(),
        "attn_entropy": torch.stack([entropy(p).mean() for p in parts or [effective]]).mean(),
        "attn_negative_share": negative_share(effective).mean(),
        "sink_mass": effective.gather(-1, first).mean(),
    }
    lam = aux.get("lambda")
    if lam is not None and lam.ndim == 3 and lam.shape[-1] == effective.shape[1]:
        stats["lambda_head"] = lam.mean((0, 1))
    return {name: value.float() for name, value in stats.items()}


def entropy(weights: Tensor) -> Tensor:
    """Compute the entropy in nats of attention weights (..., S) over the S keys.

    The weights are first scaled to sum 1, so the weight of a sink is ignored.
    """
    total = weights.sum(-1, keepdim=True)
    return torch.special.entr(weights / torch.where(total > 0, total, 1)).sum(-1)


def negative_share(weights: Tensor) -> Tensor:
    """Divide the sum of |negative weights| by the sum of |weights|, over the last dimension."""
    total = weights.abs().sum(-1)
    return weights.clamp_max(0).abs().sum(-1) / torch.where(total > 0, total, 1)


@cache
def group_of(name: str) -> str:
    """Return the metric group of a parameter.

    For example, the group of `layers.3.attention.wq.weight` is "attention".
    """
    parts = name.split(".")
    belongs = {
        "embedding": "tok_embeddings" in parts,
        "output": parts[0] == "output",
        "norm": any(part.endswith("norm") for part in parts),
        "lambda": any("lambda" in part for part in parts),
        "router": "router" in parts,
        "attention": "attention" in parts,
    }
    return next((group for group, is_member in belongs.items() if is_member), "ffn")


def component_of(name: str) -> str:
    """Return the component that a parameter belongs to in `diffllm count`, such as "wq" or "ffn".

    In attention, normalization weights belong to "head norms", and parameters of lambda and gates
    to "lambda/gate". `name` is the dotted name of the parameter.
    """
    group, parts = group_of(name), name.split(".")
    if "attention" not in parts:
        renamed = {"norm": "norms", "embedding": "embeddings/output", "output": "embeddings/output"}
        return renamed.get(group, group)
    own = parts[parts.index("attention") + 1]
    if group == "norm":
        return "head norms"
    return "lambda/gate" if group == "lambda" or "gate" in own else own
