"""Classes for the table of metrics in table.py: metrics, and their sections, plots and columns."""

import math
from dataclasses import dataclass
from typing import Literal

Combine = Literal["", "mean", "rms", "min", "max"]
"""Operation that combines the values of micro-batches and ranks, which have equally many tokens.

"rms" is the root of the mean of squares. Empty if the global batch has a single value."""

SHARES = ("share", "share of right answers")
NOT_NEGATIVE = (
    "nats per token", "bits per byte", "seconds", "s", "ms", "tokens per second", "tokens/s", "GiB",
    "magnitude", "|value|", "RMS", "L2 norm",
)  # fmt: skip
"""Units whose values are at least 0."""


def possible_values(unit: str) -> tuple[float, float]:
    """Return the least and the largest possible value of a quantity with the unit `unit`.

    The unit may be followed by a comma and further words.
    """
    name = unit.partition(",")[0]
    if name in SHARES:
        return 0.0, 1.0
    return 0.0 if name in NOT_NEGATIVE else -math.inf, math.inf


@dataclass(frozen=True)
class Section:
    title: str
    """Title in docs/metrics.md."""
    report: str = ""
    """Title in reports and dashboards; sections with equal titles are merged. Empty: no figures."""
    intro: str = ""


@dataclass(frozen=True)
class Plot:
    """A figure of the report, and a panel of dashboards, that shows a metric."""

    title: str
    caption: str = ""
    """Text with placeholders such as {smoothing}. Empty: the meaning of the metric."""
    mark: float | None = None
    """Y value of a horizontal line. None: no line."""
    folded: bool = False
    """Whether the figure is hidden until a reader opens "More figures"."""
    log: bool = False
    """Whether the y axis is logarithmic."""


@dataclass(frozen=True)
class Curve(Plot):
    """A plot of a metric against training tokens.

    If the metric has one value per layer, the plot shows the maximum over all layers.
    """

    smooth: bool = False
    """Whether the plot shows a moving average."""
    clip: bool = False
    """Whether the range of the y axis ignores the first steps and marked spikes."""
    axes: tuple[str, ...] = ("tokens",)
    """Names in `COST_AXES`: x-axes of the panels of a wandb dashboard. The report uses tokens."""


@dataclass(frozen=True)
class Layers(Plot):
    """A plot of the last logged value of a metric in each layer; the x axis is the layer index."""

    uniform: bool = False
    """Whether a line shows 1/√n, the context RMS if attention is uniform over n tokens."""


@dataclass(frozen=True)
class Bars(Plot):
    """A panel of a wandb dashboard with one bar per row: the last value of a metric.

    The report has no such figure, because its table contains these values.
    """


@dataclass(frozen=True)
class Column:
    """A column of report.csv, with one value of a metric per row.

    The value is reduced over steps and layers, and then over runs with different seeds.
    """

    steps: Literal["last", "all"]
    """Logged steps of a run that the value is computed from."""
    of: Literal["min", "max", "median"]
    """Reduction over these steps and over layers."""
    seeds: Literal["mean", "min", "max"]
    """Reduction over runs with different seeds."""
    title: str = ""
    """Title of the column in the report. Empty: only report.csv has the column."""
    unit: str = ""
    percent: bool = False
    """Whether the report shows the value in percent."""


@dataclass(frozen=True)
class Metric:
    name: str
    """Name in metrics.jsonl. A final `/*` matches a layer or a group of parameters, `_*` a head and
    a layer."""
    section: Section
    meaning: str
    unit: str = ""
    combine: Combine = ""
    probe: bool = False
    """Whether the metric needs explicit maps, every `diagnostics.probe_interval` steps."""
    summary: Literal["last", "min", "max", "mean"] = "last"
    """Reduction over steps that wandb shows for a run."""
    plots: tuple[Plot, ...] = ()
    column: Column | None = None

    @property
    def quantity(self) -> str:
        return self.name.removesuffix("*").rstrip("/_") if self.name.endswith("*") else self.name

    @property
    def column_meaning(self) -> str:
        assert self.column
        steps = f"{self.column.of} over all logged steps"
        if self.column.steps == "last":
            steps = "at the last logged step"
        layers = f", {self.column.of} over layers" if self.name.endswith("/*") else ""
        notes = {"min": " (falls with more seeds)", "max": " (rises with more seeds)"}
        seeds = f"{self.column.seeds} over seeds{notes.get(self.column.seeds, '')}"
        return f"{self.meaning}; {steps}{layers}, {seeds}"

    def covers(self, name: str) -> bool:
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name
