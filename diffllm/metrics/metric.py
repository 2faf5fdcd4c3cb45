"""The columns of the table of metrics: what can be said of one, and how it can be shown."""

from dataclasses import dataclass
from typing import Literal

Combine = Literal["", "mean", "rms", "min", "max"]
"""How values of micro-batches and ranks, equal in tokens, are combined; "rms" is the root of the
mean of squares. Empty if the global batch has one value."""


@dataclass(frozen=True)
class Section:
    title: str
    """Title in docs/metrics.md."""
    report: str = ""
    """Title in the report; sections with one title are merged, empty: no figures."""
    intro: str = ""


@dataclass(frozen=True)
class Plot:
    """A figure of the report. Its texts may hold fields that report/sections.py fills in."""

    title: str
    caption: str = ""
    mark: float | None = None
    """A value to draw a line at."""
    folded: bool = False
    log: bool = False


@dataclass(frozen=True)
class Curve(Plot):
    """Over training tokens; of a metric of layers, the largest at each step."""

    smooth: bool = False
    clip: bool = False
    """The scale ignores the first steps and spikes."""


@dataclass(frozen=True)
class Layers(Plot):
    """Over layers, at the end of training."""

    uniform: bool = False
    """A line at 1/√n, the RMS that uniform attention over a whole sequence leaves."""


@dataclass(frozen=True)
class Column:
    """A number of report.csv: one a run, from its steps and layers, then one a row of runs."""

    steps: Literal["last", "all"]
    """The last logged value, which summary.json knows too, or those of all logged steps."""
    of: Literal["min", "max", "median"]
    """Which of these, over all layers."""
    seeds: Literal["mean", "min", "max"]
    title: str = ""
    """Header in the report's table; empty for a column of report.csv alone."""
    unit: str = ""
    percent: bool = False


@dataclass(frozen=True)
class Metric:
    name: str
    """As in metrics.jsonl; `/*` at the end stands for a layer or a group of parameters, `_*` for a
    head and a layer."""
    section: Section
    meaning: str
    unit: str = ""
    combine: Combine = ""
    probe: bool = False
    """Whether it comes from explicit maps, at `diagnostics.probe_interval`."""
    summary: Literal["last", "min", "max", "mean"] = "last"
    """The value of a run that wandb shows."""
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
        more = {"min": ", the smaller the more there are", "max": ", the larger the more there are"}
        seeds = f"{self.column.seeds} over seeds{more.get(self.column.seeds, '')}"
        return f"{self.meaning}; {steps}{layers}, {seeds}"

    def covers(self, name: str) -> bool:
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name
