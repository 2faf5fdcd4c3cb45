"""Rows: the runs of one combination of swept keys, its seeds side by side, and its numbers."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diffllm.compare.report.keys import Keys, shown_value
from diffllm.compare.report.numbers import finite
from diffllm.compare.report.runs import Run
from diffllm.metrics.metric import Metric
from diffllm.metrics.table import metric_of
from diffllm.statistics.arm_comparison import ArmComparison, Share
from diffllm.statistics.estimates import Estimate, Rate, estimate

FIRST = ("standard", "gated", "diff_v1", "diff_v2")


@dataclass(frozen=True)
class EqualGap:
    gap: Estimate
    at: float
    """The amount that all runs of both reached."""
    error: float
    """Possible error of interpolation, nats per token."""


@dataclass
class Row:
    """The runs of one combination of swept keys, and their numbers."""

    label: str
    """"diff_v2", "diff_v2 lr=0.001" or, if that is too long, "B: diff_v2"."""
    keys: dict[str, Any]
    """`attention` first."""
    runs: list[Run]
    """By seed."""
    differing: dict[str, Any] = field(default_factory=dict)
    loss: Estimate | None = None
    """Final held-out loss, nats per token."""
    gap: Estimate | None = None
    """Paired over the seeds of both rows."""
    values: dict[str, Any] = field(default_factory=dict)
    """All columns of the CSV, in order."""
    baseline: "Row | None" = None
    """The row that `gap` is measured from."""
    is_baseline: bool = False
    against: "Row | None" = None
    outcome: ArmComparison | None = None
    documents: Estimate | None = None
    """The gap with its interval over documents and seeds."""
    no_documents: str = ""
    """Why `documents` is None."""
    p_holm: float | None = None
    """Adjusted for all gaps of the comparison."""
    diverged: int = 0
    """Runs that ended without a finite loss."""
    group: str = ""
    equal: dict[str, EqualGap] = field(default_factory=dict)
    incomparable: list[str] = field(default_factory=list)

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.summary is not None]

    @property
    def ended(self) -> list[Run]:
        return [run for run in self.runs if run.ended]

    @property
    def diverged_share(self) -> Share:
        return Share(self.diverged, len(self.ended))

    @property
    def seeds(self) -> int:
        return self.loss.seeds if self.loss else 0

    def fact(self, name: str) -> Any:
        return next((v for run in self.runs if (v := run.facts.get(name)) is not None), None)

    def mean(self, name: str) -> float | None:
        known = [x for run in self.finished if (x := finite((run.summary or {}).get(name)))]
        return float(np.mean(known)) if known else None

    def events(self, series: str) -> Rate | None:
        """Spike events of "loss" or "grad" per thousand judged steps."""
        count, judged = (
            sum(run_value(run, metric_of(f"spikes_detrended/{series}_{what}")) or 0
                for run in self.ended)
            for what in ("total", "judged")
        )  # fmt: skip
        return Rate(round(count), round(judged)) if round(judged) else None

    @property
    def losses(self) -> dict[tuple[int, int], float | None]:
        """By seed; None for a diverged run."""
        return {run.seeds: run.final_loss for run in self.ended}


def make_rows(runs: list[Run], keys: Keys, notes: list[str]) -> list[Row]:
    """Rows in their order, without labels and gaps; omitted duplicates are added to `notes`."""
    groups: dict[str, list[int]] = {}
    for i, values in enumerate(keys.values):
        groups.setdefault(shown_value([values[key] for key in sorted(values)]), []).append(i)
    rows = []
    for members in groups.values():
        values = keys.values[members[0]]
        same = one_a_seed([runs[i] for i in members], notes)
        row = Row("", {key: values[key] for key in keys.swept}, same, values)
        losses = [run.final_loss for run in same if run.final_loss is not None]
        row.loss = estimate(losses) if losses else None
        row.diverged = sum(run.diverged for run in same)
        rows.append(row)

    def order(row: Row) -> list[tuple[int, Any]]:
        variant, *others = row.keys.values()
        return [variant_order(variant), *map(value_order, others)]

    return sorted(rows, key=order)


def variant_order(name: str) -> tuple[int, str]:
    return (*FIRST, name).index(name), name


def value_order(value: Any) -> tuple[int, Any]:
    if value is None:
        return 0, None
    return (1, value) if isinstance(value, int | float) else (2, shown_value(value))


def one_a_seed(runs: list[Run], notes: list[str]) -> list[Run]:
    by_seed: dict[tuple[int, int], Run] = {}
    for run in sorted(
        runs, key=lambda run: (run.summary is not None, last_written(run), str(run.path))
    ):
        if other := by_seed.get(run.seeds):
            why = "newer" if (run.summary is None) == (other.summary is None) else "finished"
            notes.append(
                f"{other.path} is left out: {run.path} has the same keys and the same seed and is "
                f"{why}."
            )
        by_seed[run.seeds] = run
    return [by_seed[seeds] for seeds in sorted(by_seed)]


def last_written(run: Run) -> float:
    files = [run.path / name for name in ("summary.json", "metrics.jsonl", "config.yaml")]
    return next((file.stat().st_mtime for file in files if file.exists()), 0.0)


def row_value(row: Row, metric: Metric) -> float | None:
    assert metric.column
    known = [x for run in row.finished if (x := run_value(run, metric)) is not None]
    return float(getattr(np, metric.column.seeds)(known)) if known else None


def run_value(run: Run, metric: Metric) -> float | None:
    """A metric's number of a run, over layers and the steps of the metric's column."""
    column, layers = metric.column, metric.name.endswith("*")
    assert column
    said = finite((run.summary or {}).get(metric.name))
    if column.steps == "last" and said is not None:
        return said
    values = run.by_layer(metric.quantity).values if layers else run.series(metric.name).values
    if column.steps == "last":
        values = values[-1:]
    values = values[np.isfinite(values)]
    return float(getattr(np, column.of)(values)) if len(values) else None
