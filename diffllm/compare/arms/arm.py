"""Arms: runs that differ only in the seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from diffllm.compare.arms.run import Run, run_value
from diffllm.compare.arms.sentences import finite
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.metrics.metric import Metric
from diffllm.metrics.table import metric_of
from diffllm.statistics.divergence import Share
from diffllm.statistics.estimates import Estimate, Rate, estimate

Seeds = tuple[int, int]
"""The pair (seed, model.init_seed) of a run."""


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs that differ only in the seed, and statistics over these runs."""

    label: str
    """"diff_v2", "diff_v2 lr=0.001" or, if that is too long, "B: diff_v2"."""
    keys: dict[str, Any]
    """Values of the keys that distinguish the arms."""
    runs: Sequence[Run]
    """Sorted by seed."""
    differing: dict[str, Any] = field(default_factory=dict)
    """Values of the keys in `keys`, and of the keys that must agree in compared arms."""
    group: str = ""
    """Letter of the group of comparable arms; "" if all arms are comparable."""

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.summary is not None]

    @property
    def ended(self) -> list[Run]:
        return [run for run in self.runs if run.ended]

    @property
    def measured(self) -> dict[Seeds, Run]:
        """Runs with a finite final loss."""
        return {run.seeds: run for run in self.runs if run.final_loss is not None}

    @property
    def losses(self) -> dict[Seeds, float | None]:
        """Final losses of ended runs in nats per token; None for a diverged run."""
        return {run.seeds: run.final_loss for run in self.ended}

    @cached_property
    def documents(self) -> dict[Seeds, DocumentLosses]:
        """Losses of held-out documents of the measured runs that stored them."""
        losses = {}
        for seeds, run in self.measured.items():
            if run.documents is not None:
                losses[seeds] = run.documents
        return losses

    @cached_property
    def loss(self) -> Estimate | None:
        """Mean final held-out loss, in nats per token; None if no run is measured."""
        losses = [loss for loss in self.losses.values() if loss is not None]
        return estimate(losses).within(0.0, math.inf) if losses else None

    @property
    def seeds(self) -> int:
        """Number of measured runs."""
        return self.loss.seeds if self.loss else 0

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    @property
    def diverged_share(self) -> Share:
        return Share(self.diverged, len(self.ended))

    def fact(self, name: str) -> Any:
        """Return an entry of run.json of the first run that has the entry; None without one."""
        for run in self.runs:
            value = run.facts.get(name)
            if value is not None:
                return value
        return None

    def mean(self, name: str) -> float | None:
        """Return the mean of an entry of summary.json over finished runs, without 0 and NaN."""
        numbers = [finite((run.summary or {}).get(name)) for run in self.finished]
        known = [number for number in numbers if number]
        return float(np.mean(known)) if known else None

    def value(self, metric: Metric) -> float | None:
        """Return a column of report.csv: the metric of finished runs, combined over seeds."""
        assert metric.column
        values = [run_value(run, metric) for run in self.finished]
        known = [value for value in values if value is not None]
        return finite(getattr(np, metric.column.seeds)(known)) if known else None

    def events(self, series: str) -> Rate | None:
        """Return the rate of spikes of "loss" or "grad" per tested step over all ended runs.

        Return None if no step was tested.
        """
        spikes = self.total(f"spikes_detrended/{series}_total")
        judged = self.total(f"spikes_detrended/{series}_judged")
        return Rate(spikes, judged) if judged else None

    def total(self, name: str) -> int:
        """Return the sum of a counter over all ended runs."""
        counts = [finite(run_value(run, metric_of(name))) or 0 for run in self.ended]
        return round(sum(counts))
