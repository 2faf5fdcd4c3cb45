"""Types of the table of metrics: a metric has a name, a meaning, a unit and plots."""

from dataclasses import dataclass
from typing import Literal

Combine = Literal["", "mean", "rms", "min", "max"]
"""Operation that combines the values of micro-batches and ranks, which have equally many tokens.

"rms" is the root of the mean of squares. Empty if the global batch has a single value."""


@dataclass(frozen=True)
class Section:
    title: str
    """Title in docs/metrics.md."""
    report: str = ""
    """Title in the report; sections with equal titles are merged. Empty: no figures."""
    intro: str = ""


@dataclass(frozen=True)
class Plot:
    """A figure of the report. Title and caption may contain placeholders such as {smoothing}."""

    title: str
    caption: str = ""
    mark: float | None = None
    """Value at which a line is drawn."""
    folded: bool = False
    log: bool = False


@dataclass(frozen=True)
class Curve(Plot):
    """A plot of a metric over training tokens, or of its largest value over the layers."""

    smooth: bool = False
    clip: bool = False
    """The scale ignores the first steps and spikes."""


@dataclass(frozen=True)
class Layers(Plot):
    """A plot of a metric over the layers, at the end of training."""

    uniform: bool = False
    """Whether to draw a line at 1/√n, the RMS under uniform attention over a whole sequence."""


@dataclass(frozen=True)
class Column:
    """A column of report.csv: a metric, reduced over steps and layers and then over seeds."""

    steps: Literal["last", "all"]
    """"last": the last logged value, as in summary.json; "all": the values of all logged steps."""
    of: Literal["min", "max", "median"]
    """Reduction over these steps and over layers."""
    seeds: Literal["mean", "min", "max"]
    title: str = ""
    """Header in the report's table; empty if the column is only in report.csv."""
    unit: str = ""
    percent: bool = False


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
        more = {"min": " (falls with more seeds)", "max": " (rises with more seeds)"}
        seeds = f"{self.column.seeds} over seeds{more.get(self.column.seeds, '')}"
        return f"{self.meaning}; {steps}{layers}, {seeds}"

    def covers(self, name: str) -> bool:
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name
