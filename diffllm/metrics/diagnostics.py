"""Statistics of all layers in a training step, combined over micro-batches and ranks."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.core.keys import key
from diffllm.metrics.table import metric_of

Stats = dict[str, Tensor]
"""Statistics by quantity, each (L,) or (L, heads) over layers and heads."""

MERGE: dict[str, Any] = {
    "mean": torch.add,
    "rms": torch.hypot,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""Operations that merge two micro-batches. "mean" and "rms" accumulate sums and roots of sums of
squares; `reduce_stats` divides by the number of micro-batches and ranks."""
SUM, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX
OPS = {SUM: ("mean", "rms"), MIN: ("min",), MAX: ("max",)}


@dataclass
class DiagnosticsConfig:
    """Settings of layer statistics and of probes, which measure attention maps at some queries."""

    interval: int = key(
        10,
        least=0,
        effect="logging",
        help="Steps between in-block statistics; 0 turns them off.",
    )
    probe_interval: int = key(
        100,
        least=0,
        effect="logging",
        help="Steps between probes of explicit maps; 0 turns them off.",
    )
    probe_queries: int = key(
        8,
        least=1,
        effect="logging",
        help="Number of query positions per probe, drawn at random over the sequence for each "
        "probe.",
    )


def due_stats(stats: Stats, statistics: bool, probes: bool) -> Stats:
    """Return the results of probes if `probes` is true, and the rest if `statistics` is true."""
    due = {}
    for name, value in stats.items():
        is_due = probes if metric_of(name).probe else statistics
        if is_due:
            due[name] = value
    return due


def probe_positions(cfg: DiagnosticsConfig, seq_len: int, seed: int, step: int) -> Tensor | None:
    """Draw the query positions of the attention probe in training step `step`.

    Return N positions, (N,) int64 on the CPU, or None if `cfg.probe_interval` is 0. N is
    `cfg.probe_queries`, but at most `seq_len`. The sequence without its first token is divided into
    N equal segments, and one position is drawn in each segment.
    """
    if not cfg.probe_interval:
        return None
    segments = min(cfg.probe_queries, seq_len)
    edges = np.linspace(min(1, seq_len - 1), seq_len, segments + 1)
    # A seed of NumPy must not be negative.
    rng = np.random.default_rng((seed % 2**64, step))
    positions = np.floor(rng.uniform(edges[:-1], edges[1:]))
    return torch.from_numpy(positions.astype(np.int64))


def merge(into: Stats, new: Stats) -> Stats:
    if not into:
        return new
    merged: Stats = {}
    for name, value in new.items():
        operation = MERGE[metric_of(name).combine]
        merged[name] = operation(into[name], value)
    return merged


def reduce_stats(stats: Stats, micro_batches: int) -> Stats:
    """Combine each statistic over ranks by mean, RMS, minimum or maximum (`Metric.combine`).

    All ranks receive the same results. Every rank must call this.

    Args:
        stats: float32 tensor (layers,) or (layers, heads) of each statistic, already merged over
            the micro-batches of this rank by `merge`.
        micro_batches: number of micro-batches per rank, to convert merged sums to means.
    """
    reduced: Stats = {}
    for op, kinds in OPS.items():
        selected: Stats = {}
        for name, value in stats.items():
            if metric_of(name).combine in kinds:
                selected[name] = value
        # All ranks have statistics of the same names, so either all ranks skip the collective or
        # none.
        if not selected:
            continue
        flat = []
        for name, value in selected.items():
            # A sum over ranks needs sums of squares, not their roots.
            addend = value.square() if metric_of(name).combine == "rms" else value
            flat.append(addend.flatten())
        # One collective for all statistics, because each collective costs a latency.
        packed = torch.cat(flat)
        if op != SUM:
            # Some backends ignore NaN in minima and maxima.
            in_place_of_nan = math.inf if op == MAX else -math.inf
            packed = packed.nan_to_num(in_place_of_nan, math.inf, -math.inf)
        dist.all_reduce(packed, op)
        if op == SUM:
            # Micro-batches and ranks have equally many tokens, so their weights are equal.
            packed = packed / (micro_batches * dist.get_world_size())
        parts = packed.split([value.numel() for value in selected.values()])
        for (name, value), part in zip(selected.items(), parts, strict=True):
            combined = part.view_as(value)
            is_square = metric_of(name).combine == "rms"
            reduced[name] = combined.sqrt() if is_square else combined
    return reduced


def expert_load(counts: Tensor) -> Stats:
    """Return the largest and the smallest load of an expert in each of L layers, (L,) float32 each.

    `counts` (L, E) int64 contains the number of tokens of each expert in the global batch. The load
    is this number divided by the mean over the experts of the layer.
    """
    load = counts / counts.float().mean(1, keepdim=True)
    return {"expert_load_max": load.amax(1), "expert_load_min": load.amin(1)}


def named_values(stats: Stats) -> dict[str, float]:
    """Return all values by name, such as "context_rms/layer_03" or "lambda_head_01/layer_03".

    Layers and heads are numbered from 0. If a statistic has values for fewer layers than others,
    the values belong to the last layers: in some models, the first layers have no experts.
    """
    if not stats:
        return {}
    n_layers = max(map(len, stats.values()))
    packed = torch.cat([value.flatten() for value in stats.values()])
    # One transfer from the GPU for all values, because each transfer waits for the GPU.
    numbers = iter(packed.tolist())
    number_by_name = {}
    for name, value in stats.items():
        heads = [""]
        if value.ndim == 2:
            heads = [f"_{i:02d}" for i in range(value.shape[1])]
        for layer in range(n_layers - len(value), n_layers):
            for head in heads:
                number_by_name[f"{name}{head}/layer_{layer:02d}"] = next(numbers)
    return number_by_name
