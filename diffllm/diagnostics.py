"""Per-layer statistics of a step: combined over micro-batches and ranks, named for logging."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from diffllm.errors import ConfigError
from diffllm.model.stats import Stats, combine_by

REDUCE = {"mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@dataclass
class DiagnosticsConfig:
    """How often statistics are taken."""

    interval: int = 10
    """Steps between in-block statistics; 0 turns them off."""

    def validate(self) -> None:
        """Raise ConfigError for a negative interval."""
        if self.interval < 0:
            raise ConfigError(f"diagnostics.interval={self.interval} must not be negative")


def merge(into: Stats, new: Stats) -> Stats:
    """Combine the statistics of two micro-batches; means become sums until `reduce_stats`."""
    if not into:
        return new
    combine: dict[str, Any] = {"mean": torch.add, "min": torch.minimum, "max": torch.maximum}
    return {name: combine[combine_by(name)](into[name], new[name]) for name in new}


def reduce_stats(stats: Stats, micro_batches: int) -> Stats:
    """Combine over ranks, one packed collective a kind; each (L,) float32, equal on all ranks."""
    reduced: Stats = {}
    for kind, op in REDUCE.items():
        names = [name for name in stats if combine_by(name) == kind]
        if not names:
            continue
        packed = torch.stack([stats[name] for name in names])
        dist.all_reduce(packed, op)
        if kind == "mean":
            packed = packed / (micro_batches * dist.get_world_size())
        reduced.update(zip(names, packed, strict=True))
    return reduced


def named_values(stats: Stats) -> dict[str, float]:
    """`<quantity>/layer_<i>` for every layer, moved to the host in one copy."""
    if not stats:
        return {}
    rows = torch.stack(list(stats.values())).tolist()
    return {
        f"{name}/layer_{layer:02d}": value
        for name, row in zip(stats, rows, strict=True)
        for layer, value in enumerate(row)
    }
