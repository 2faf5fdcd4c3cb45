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
    """A figure of the report, which replaces placeholders such as {smoothing} in title and caption.

    `mark` is the y value of a horizontal line (None: no line), and `log` selects a logarithmic y
    axis. If `folded` is true, the figure is hidden until a reader opens "More figures".
    """

    title: str
    caption: str = ""
    mark: float | None = None
    folded: bool = False
    log: bool = False


@dataclass(frozen=True)
class Curve(Plot):
    """A plot against training tokens: of a metric, or of a layer metric's maximum over all layers.

    If `smooth` is true, a moving average is drawn. If `clip` is true, the range of the y axis
    ignores the first steps and spikes.
    """

    smooth: bool = False
    clip: bool = False


@dataclass(frozen=True)
class Layers(Plot):
    """A plot of the last logged value of a metric in each layer; the x axis is the layer index.

    If `uniform` is true, a line shows 1/√n, the RMS under uniform attention over n tokens.
    """

    uniform: bool = False


@dataclass(frozen=True)
class Column:
    """A column of report.csv with a value of a metric.

    `steps` selects the last or all logged steps of a run. `of` is the reduction over these steps
    and over layers, and `seeds` the reduction over the runs with different seeds. The report has
    the same column with `title` and `unit` in its header, in percent if `percent` is true. If
    `title` is empty, the report has no such column.
    """

    steps: Literal["last", "all"]
    of: Literal["min", "max", "median"]
    seeds: Literal["mean", "min", "max"]
    title: str = ""
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
