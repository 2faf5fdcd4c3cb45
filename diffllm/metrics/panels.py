"""Sections of figures, in one order for report.html, wandb dashboards and TensorBoard."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from diffllm.metrics.metric import Bars, Curve, Metric, Section
from diffllm.metrics.sections import SECTIONS
from diffllm.metrics.table import METRICS

TITLE_ENDINGS = {"tokens": "", "training_flops": ", over FLOPs"}
"""End of a panel's title, by x-axis."""
BY_GROUP = "by group"
"""Text for the placeholder {group} in the title of a panel that shows all groups."""


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard: lines over `axis`, one bar per row if `axis` is empty, or `text`."""

    title: str
    metrics: tuple[str, ...]
    """Names of the metrics; empty if `pattern` selects them."""
    pattern: str = ""
    """Regular expression for the start of the metric names, such as "^context_rms/"."""
    axis: str = "tokens"
    log: bool = False
    """Whether the y-axis is logarithmic."""
    text: str = ""
    """Markdown text. The panel then shows no metrics."""


@dataclass(frozen=True)
class PanelSection:
    title: str
    panels: tuple[Panel, ...]


def sections_by_title() -> dict[str, list[Section]]:
    """Return the sections with figures by title, in the order of `SECTIONS`."""
    sections: dict[str, list[Section]] = {}
    for section in SECTIONS:
        if section.report:
            sections.setdefault(section.report, []).append(section)
    return sections


def panels_of(sections: Collection[Section], names: Collection[str] | None = None) -> list[Panel]:
    """Return the panels of all metrics in `sections`, in the order of the sections and `METRICS`.

    Args:
        names: names of logged metrics, such as "hidden_top1/layer_00". Panels that match none of
            them are omitted. None keeps all panels.
    """
    panels = []
    for section in sections:
        for metric in METRICS:
            logged = names is None or any(map(metric.covers, names))
            if metric.section is section and metric.plots and logged:
                panels += metric_panels(metric)
    return panels


def metric_panels(metric: Metric) -> list[Panel]:
    """Return the panels of a metric: one per x-axis of its first plot, and one with its bars.

    If the metric has one value per layer, a panel has one line per layer.
    """
    selection: dict[str, Any] = {"metrics": (metric.name,)}
    if metric.name.endswith("*"):
        selection = {"metrics": (), "pattern": f"^{re.escape(metric.name[:-1])}"}
    first = metric.plots[0]
    axes = first.axes if isinstance(first, Curve) else ("tokens",)
    title = first.title.format(group=BY_GROUP)
    panels = [
        Panel(title + TITLE_ENDINGS[axis], axis=axis, log=first.log, **selection) for axis in axes
    ]
    for plot in metric.plots:
        if isinstance(plot, Bars):
            panels.append(Panel(plot.title, axis="", **selection))
    return panels


def tensorboard_layout() -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return the argument of `SummaryWriter.add_custom_scalars`: charts by section and title.

    TensorBoard matches regular expressions with the start of the metric names. Its x-axis is the
    training step, so each metric has one chart.
    """
    layout: dict[str, dict[str, tuple[str, list[str]]]] = {}
    for title, sections in sections_by_title().items():
        charts = {}
        for panel in panels_of(sections):
            if panel.axis == "tokens":
                names = [f"^{re.escape(name)}$" for name in panel.metrics]
                charts[panel.title] = ("Multiline", names or [panel.pattern])
        if charts:
            layout[title] = charts
    return layout
