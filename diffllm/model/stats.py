"""Statistics of decoder blocks and attention maps, and parameter groups for metrics.

diffllm/metrics/table.py defines how to combine statistics of several ranks and micro-batches.

Shapes: B batch, T tokens, D model width, K value heads, E experts, N query positions, h attention
heads (n_heads / 2 in variant V1).
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from diffllm.model.attention.base import Attention, Aux
from diffllm.model.attention.masks import Documents
from diffllm.model.attention.ops import attention_scores
from diffllm.model.attention.slices import Slices

BlockStats = dict[str, Tensor]
ATTENTION_COMPONENTS = ("wq", "wk", "wv", "wo", "lambda/gate", "head norms")
OTHER_COMPONENTS = ("ffn", "router", "norms", "embeddings/output")
PARAMETER_GROUPS = ("embedding", "attention", "lambda", "ffn", "norm", "router", "output")


def block_stats(x: Tensor, aux: Aux | None, slices: Slices | None = None) -> BlockStats:
    """Compute scalar statistics, such as "context_rms", of a decoder block with output x (B, T, D).

    If `slices` is given, the tensors are this rank's slice of each sequence.
    Returns float32 scalars by name, or {} if `aux` is None. `aux` may contain these tensors:

    - "context" (B, T, h, width): input of `wo`; always present.
    - "v" (B, T, K, width): attention values.
    - "residual" (B, T, D): input of the block.
    - "attn_write" and "ffn_write" (B, T, D): outputs of attention and of the FFN.
    - "lambda": factor on the second attention map. "gate": output gate of attention.
    - "router" (B * T, E): expert scores of a MoE layer, scaled to sum 1 per token; 0 for padding,
      which then adds 0 to the mean "router_entropy".
    """
    if aux is None:
        return {}
    with torch.no_grad():
        stats: BlockStats = {}
        stats["hidden_top1"] = x.abs().amax().float()
        stats["hidden_kurtosis"] = kurtosis(x)
        rms = over_channels(aux["context"])
        stats["context_rms"] = rms.mean()
        stats |= extremes("context_rms", rms)
        if "v" in aux:
            ratio = rms / values_rms(aux["v"], slices)
            stats["context_over_value_rms"] = ratio.mean()
            stats |= extremes("context_over_value_rms", ratio)
        if "lambda" in aux:
            lam = aux["lambda"].float()
            stats["lambda_mean"] = lam.mean()
            stats |= extremes("lambda", lam)
        if "gate" in aux:
            stats["gate_mean"] = aux["gate"].float().mean()
        if "router" in aux:
            entropies = torch.special.entr(aux["router"]).sum(-1)
            stats["router_entropy"] = entropies.mean()
        for name in ("residual", "attn_write", "ffn_write"):
            if name in aux:
                # float32, because a mean of squares in bf16 has only 8 significant bits.
                mean_square = aux[name].float().square().mean()
                stats[f"{name}_rms"] = mean_square.sqrt()
    return stats


def over_channels(x: Tensor) -> Tensor:
    mean_squares = x.float().square().mean(-1)
    return mean_squares.sqrt()


def values_rms(v: Tensor, slices: Slices | None = None) -> Tensor:
    """Compute one RMS per sequence of the attention values v (B, T, K, width): (B, 1, 1)."""
    mean_squares = v.float().square().mean((1, 2, 3))
    if slices:
        # Collective: the values of a sequence are divided between the ranks.
        mean_squares = slices.mean(mean_squares)
    rms = mean_squares.sqrt().clamp_min(1e-30)
    return rms[:, None, None]


def extremes(name: str, values: Tensor) -> BlockStats:
    return {f"{name}_min": values.amin(), f"{name}_max": values.amax()}


def kurtosis(x: Tensor) -> Tensor:
    """Compute the kurtosis along the last dimension (3 if normal); return its mean, a scalar."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    squares = centred.square()
    variance = squares.mean(-1)
    fourth_moment = squares.square().mean(-1)
    ratios = fourth_moment / variance.square().clamp_min(1e-30)
    return ratios.mean()


def stack_stats(layers: list[BlockStats]) -> BlockStats:
    """Stack each statistic over the layers that have it, for all statistics of the last layer."""
    stacked = {}
    for name in layers[-1]:
        # Dense layers before the MoE layers have no statistics of a router.
        values = [stats[name] for stats in layers if name in stats]
        stacked[name] = torch.stack(values)
    return stacked


class Probe(NamedTuple):
    """Query positions at which attention maps are measured, and the keys visible to each query."""

    positions: Tensor
    """Query positions, the same in all sequences: (N,) int64."""
    visible: Tensor
    """Keys visible to each query: (B or 1, 1, N, T) boolean."""


def probe_at(positions: Tensor, length: int, documents: Documents | None) -> Probe:
    """Build the `Probe` of the query positions (N,) in sequences of `length` tokens.

    A query sees the keys up to its position. If `documents` is given, the query sees only keys of
    the same document.
    """
    keys = torch.arange(length, device=positions.device)
    is_not_later = keys <= positions[:, None]  # (N, T)
    visible = is_not_later[None, None]
    if documents is not None:
        ids_of_queries = documents.ids[:, positions, None]
        ids_of_keys = documents.ids[:, None, :]
        is_same_document = ids_of_queries == ids_of_keys  # (B, N, T)
        visible = visible & is_same_document[:, None]
    return Probe(positions, visible)


@torch.no_grad()
def probe_stats(
    attention: Attention,
    x: Tensor,
    aux: Aux,
    probe: Probe,
    slices: Slices | None = None,
) -> BlockStats:
    """Measure the attention maps of one layer at the query positions of `probe`.

    `x` (B, T, D) is the input of attention. `aux` contains the queries "q" and keys "k". The
    effective map is the last map of `attention.maps`: the difference map in differential attention,
    and otherwise the only map, a softmax map. If `slices` is given, the tensors are this rank's
    slice of each sequence; all ranks that share the sequences return the same values.
    Returns float32 tensors by name:

    - attn_logit_top1: largest logit q k / sqrt(d) over all visible keys, heads and sequences.
    - attn_entropy: mean `entropy` of the softmax maps.
    - sink_mass: mean weight of the first visible key in the effective map; may be negative.
    - attn_negative_share: mean `negative_share` of the effective map.
    - lambda_head (h,): mean lambda of each head over tokens, only if each head has its own lambda.

    Means are over sequences, heads and query positions, if not stated otherwise.
    """
    if slices:
        # Collectives: all ranks that share the sequences must reach these lines, in this order.
        x = slices.pick(x, probe.positions)
        q = slices.pick(aux["q"], probe.positions)
        k = slices.gather(aux["k"])
    else:
        x = x[:, probe.positions]
        q = aux["q"][:, probe.positions]
        k = aux["k"]
    scores = attention_scores(q, k)
    scores = scores.masked_fill(~probe.visible, float("-inf"))
    maps = list(attention.maps(x, q, k, probe.visible).values())
    effective = maps[-1]
    # A single map is a softmax map; otherwise, the last map is computed from the softmax maps
    # before it.
    softmax_maps = maps if len(maps) == 1 else maps[:-1]
    entropies = [entropy(weights).mean() for weights in softmax_maps]
    # argmax returns the first of equal values, here the first visible key.
    first_keys = probe.visible.int().argmax(-1, keepdim=True)
    first_keys = first_keys.expand(*effective.shape[:3], 1)
    stats = {
        "attn_logit_top1": scores.amax(),
        "attn_entropy": torch.stack(entropies).mean(),
        "attn_negative_share": negative_share(effective).mean(),
        "sink_mass": effective.gather(-1, first_keys).mean(),
    }
    # A lambda that all heads share has another shape.
    lam = aux.get("lambda")
    if lam is not None and lam.ndim == 3 and lam.shape[-1] == effective.shape[1]:
        stats["lambda_head"] = lam.mean((0, 1))
    return {name: value.float() for name, value in stats.items()}


def entropy(weights: Tensor) -> Tensor:
    """Compute the entropy in nats of attention weights (..., S) over the S keys.

    The weights are first scaled to sum 1, because an attention sink makes the sum less than 1.
    """
    total = weights.sum(-1, keepdim=True)
    # If the total is 0, all weights are 0: a division by 1 gives the entropy 0, not NaN.
    shares = weights / torch.where(total > 0, total, 1)
    return torch.special.entr(shares).sum(-1)


def negative_share(weights: Tensor) -> Tensor:
    """Return sum(|negative weights|) / sum(|all weights|), with sums over the last dimension."""
    total = weights.abs().sum(-1)
    negative = weights.clamp_max(0).abs().sum(-1)
    return negative / torch.where(total > 0, total, 1)


@cache
def group_of(name: str) -> str:
    """Return the element of `PARAMETER_GROUPS` to which the parameter `name` belongs.

    For example, the group of `layers.3.attention.wq.weight` is "attention".
    """
    # The order matters: norms, lambdas and routers are inside attention or feed-forward layers.
    parts = name.split(".")
    if "tok_embeddings" in parts:
        return "embedding"
    if parts[0] == "output":
        return "output"
    if any(part.endswith("norm") for part in parts):
        return "norm"
    if "lambda" in name:
        return "lambda"
    if "router" in parts:
        return "router"
    return "attention" if "attention" in parts else "ffn"


def component_of(name: str) -> str:
    """Return the component, such as "wq" or "ffn", under which `diffllm count` counts a parameter.

    Normalization weights inside attention count as "head norms". Parameters of lambda and of gates
    count as "lambda/gate". `name` is the dotted name of the parameter.
    """
    group = group_of(name)
    parts = name.split(".")
    if "attention" not in parts:
        if group == "norm":
            return "norms"
        if group in ("embedding", "output"):
            return "embeddings/output"
        return group
    if group == "norm":
        return "head norms"
    module_name = parts[parts.index("attention") + 1]
    if group == "lambda" or "gate" in module_name:
        return "lambda/gate"
    return module_name
