"""Arms: runs that differ only in the seed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from diffllm.compare.arms.run import EVAL_LOSS, Run, Series, run_value
from diffllm.compare.arms.sentences import finite
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.metrics.metric import Metric
from diffllm.metrics.table import metric_of
from diffllm.statistics.divergence import Share
from diffllm.statistics.estimates import Estimate, Rate, estimate
from diffllm.statistics.gap_tests import Seed

AnyRun = TypeVar("AnyRun", covariant=True)
Seeds = tuple[int, int]
"""The pair (seed, model.init_seed) of a run."""


@dataclass(frozen=True, eq=False)
class Arm(Generic[Seed]):
    """Runs that differ only in the seed, with the compared value of each seed."""

    label: str
    """Name, such as "diff_v2 lr=0.001", or in reports with long labels "B: diff_v2"."""
    seed_values: Mapping[Seed, float | None]
    """Value of each ended seed, such as the final loss; None, NaN or infinity if it diverged."""

    @property
    def finite_values(self) -> dict[Seed, float]:
        """Values by seed, without those of diverged seeds."""
        numbers = {}
        for seed, value in self.seed_values.items():
            if value is not None and math.isfinite(value):
                numbers[seed] = value
        return numbers

    @property
    def mean(self) -> Estimate | None:
        """Mean of the finite values; None without a finite value."""
        numbers = [*self.finite_values.values()]
        return estimate(numbers) if numbers else None

    @property
    def diverged_share(self) -> Share:
        """Share of ended seeds that diverged."""
        ended = len(self.seed_values)
        return Share(ended - len(self.finite_values), ended)

    @property
    def documents(self) -> Mapping[Seed, DocumentLosses]:
        """Losses of held-out documents, whose mean is the value; {} if they are unknown."""
        return {}

    @property
    def curves(self) -> Mapping[Seed, Series]:
        """Values that were logged during training, without those of diverged seeds."""
        return {}

    @property
    def planned_tokens(self) -> set[int]:
        """Planned training tokens of the runs."""
        return set()


class HasRuns(Protocol[AnyRun]):
    @property
    def runs(self) -> Sequence[AnyRun]: ...


def runs_of(arms: Iterable[HasRuns[AnyRun]]) -> list[AnyRun]:
    """Return the runs of all arms, in the order of the arms."""
    runs: list[AnyRun] = []
    for arm in arms:
        runs += arm.runs
    return runs


def have_equal_tokens(arm: Arm[Seed], base: Arm[Seed]) -> bool:
    """Return whether all runs of two arms train on equally many tokens.

    Otherwise, the learning rates of the arms differ after equal tokens.
    """
    return len(arm.planned_tokens | base.planned_tokens) == 1


@dataclass(frozen=True, eq=False)
class RunArm(Arm[Seeds]):
    """Run directories that differ only in the seed. The compared value is the final loss."""

    keys: dict[str, Any]
    """Values of the keys that distinguish the arms."""
    runs: Sequence[Run]
    """Sorted by seed."""
    differing: dict[str, Any]
    """Values of the keys in `keys`, and of the keys that must agree in compared arms."""
    group: str = ""
    """Letter of the group of comparable arms; "" if all arms are comparable."""

    @classmethod
    def of(
        cls, label: str, keys: dict[str, Any], runs: Sequence[Run], differing: dict[str, Any]
    ) -> "RunArm":
        """Return the arm of `runs`, with the final losses of ended runs as values."""
        losses = {run.seeds: run.final_loss for run in runs if run.ended}
        return cls(label, losses, keys, runs, differing)

    @property
    def variant(self) -> str:
        """Attention variant."""
        return str(self.keys["attention"])

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

    @cached_property
    def documents(self) -> dict[Seeds, DocumentLosses]:
        losses = {}
        for seeds, run in self.measured.items():
            if run.documents is not None:
                losses[seeds] = run.documents
        return losses

    @property
    def curves(self) -> dict[Seeds, Series]:
        return {seeds: run.series(EVAL_LOSS) for seeds, run in self.measured.items()}

    @property
    def planned_tokens(self) -> set[int]:
        return {run.planned_tokens for run in self.runs}

    @cached_property
    def loss(self) -> Estimate | None:
        """Mean final held-out loss, in nats per token; None if no run is measured."""
        return self.mean.within(0.0, math.inf) if self.mean else None

    @property
    def seeds(self) -> int:
        """Number of measured runs."""
        return self.loss.seeds if self.loss else 0

    @property
    def seeds_text(self) -> str:
        """Number of measured runs, such as "2 of 3"."""
        runs = len(self.runs)
        return f"{runs}" if self.seeds == runs else f"{self.seeds} of {runs}"

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    def fact(self, name: str) -> Any:
        """Return an entry of run.json of the first run that has the entry; None without one."""
        for run in self.runs:
            value = run.facts.get(name)
            if value is not None:
                return value
        return None

    def summary_mean(self, name: str) -> float | None:
        """Return the mean of an entry of summary.json over finished runs, without 0 and NaN."""
        numbers = []
        for run in self.finished:
            number = run.summary_number(name)
            if number:
                numbers.append(number)
        return float(np.mean(numbers)) if numbers else None

    def value(self, metric: Metric) -> float | None:
        """Return a column of report.csv: the metric of finished runs, combined over seeds."""
        assert metric.column
        values = []
        for run in self.finished:
            value = run_value(run, metric)
            if value is not None:
                values.append(value)
        if not values:
            return None
        # NaN of one seed makes the result NaN, so an outlier that is not finite is not hidden.
        combine = getattr(np, metric.column.seeds)
        return finite(combine(values))

    def events(self, series: str) -> Rate | None:
        """Return the rate of spikes of "loss" or "grad" per tested step over all ended runs.

        Return None if no step was tested.
        """
        spikes = self.total(f"spikes_detrended/{series}_total")
        judged = self.total(f"spikes_detrended/{series}_judged")
        return Rate(spikes, judged) if judged else None

    def total(self, name: str) -> int:
        """Return the sum of a counter over all ended runs."""
        metric = metric_of(name)
        counts = [finite(run_value(run, metric)) or 0 for run in self.ended]
        return round(sum(counts))
