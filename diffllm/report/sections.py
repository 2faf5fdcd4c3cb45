"""The figures of a report, as the table of metrics lists them, and what each says.

A section without data is left out; so is a figure that no run has the metrics for, or only zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from diffllm.metrics.metric import Curve, Heatmap, Layers, Metric, Plot, Section
from diffllm.metrics.table import LOSS, METRICS, SECTIONS
from diffllm.report import bands
from diffllm.report.comparison import Comparison
from diffllm.report.drawing import Bands, draw_curves, draw_layers
from diffllm.report.heatmaps import draw_bar, draw_map, heatmaps
from diffllm.report.numbers import short
from diffllm.report.runs import Run, Series
from diffllm.report.style import RowStyle, to_svg

BY_LAYER = (
    "Figures by layer show finished runs, or all where no run of a row has finished, at the last "
    "logged step that they have in common."
)


class Card(NamedTuple):
    """A figure of the page: one drawing, or a panel a row under a shared colour bar."""

    name: str
    """Its title has the id `name`-title."""
    title: str
    caption: str
    svg: str
    panels: Sequence[tuple[RowStyle, str]]
    """The map of each row, as an <svg>."""


class PageSection(NamedTuple):
    """Figures on one subject."""

    title: str
    intro: str
    figures: list[Card]


def sections(comparison: Comparison, styles: list[RowStyle]) -> list[PageSection]:
    """The sections that have a figure; neighbours that share a title are one."""
    draw = Figures(comparison, styles)
    found = []
    for title, group in groupby(SECTIONS, key=lambda section: section.report):
        parts = [(section, cards) for section in group if (cards := draw.cards(section))]
        if parts:
            intro = " ".join(filter(None, (draw.intro(section) for section, _ in parts)))
            found.append(PageSection(title, intro, [card for _, cards in parts for card in cards]))
    return found


class Figures:
    """Draws the figures of one comparison."""

    def __init__(self, comparison: Comparison, styles: list[RowStyle]):
        self.rows, self.styles, self.baseline = comparison.rows, styles, comparison.baseline
        self.runs = [run for row in self.rows for run in row.runs]
        self.count = 0
        logged = [len(run.series("train/loss").values) for run in self.runs]
        self.smoothed_over = points = bands.window(max(logged))
        lengths = {run.cfg.seq_len for run in self.runs}
        self.length = n = min(lengths) if len(lengths) == 1 else None
        """Tokens a sequence, where all runs agree."""
        keys = ", ".join(comparison.differences)
        self.fields = {
            "smoothing": f"Running mean over {points} logged steps" if points > 1
            else "At logged steps",
            "uniform": f" ({short(n**-0.5)} at n = {n:,})" if n else "",
            "incomparable": f" Rows are not comparable: they differ in {keys}." if keys else "",
        }  # fmt: skip
        """Texts that the table of metrics leaves open."""

    def intro(self, section: Section) -> str:
        """The first sentences, and which runs and step figures over layers show."""
        plots = [plot for metric in METRICS if metric.section is section for plot in metric.plots]
        text = section.intro.format(**self.fields)
        return f"{text} {BY_LAYER}" if any(isinstance(plot, Layers) for plot in plots) else text

    def cards(self, section: Section) -> list[Card]:
        """The figures of a section, in the order of the table."""
        cards = [
            card
            for metric in METRICS
            if metric.section is section
            for plot in metric.plots
            for card in self.plot(metric, plot)
        ]
        return [*cards, *self.gap(), *self.second_half()] if section is LOSS else cards

    def plot(self, metric: Metric, plot: Plot) -> list[Card]:
        """The figures of one entry of the table: one, one a group of parameters, or none."""
        cards = []
        for group, pick in self.series_of(metric):
            fields = {**self.fields, "group": group}
            caption = plot.caption.format(**fields) or f"{metric.meaning}."
            if isinstance(plot, Heatmap):
                cards += self.maps(plot.title, caption, metric.quantity)
            elif isinstance(plot, Layers):
                cards += self.layers(plot, caption, metric)
            elif isinstance(plot, Curve):
                if metric.name.endswith("*") and not group:
                    caption += " At each step, of the layer where it is highest."
                titled = replace(plot, title=plot.title.format(**fields))
                curves = self.over_tokens(pick, plot.smooth)
                cards += self.curves(titled, caption, metric.unit, curves)
        return cards

    def series_of(self, metric: Metric) -> list[tuple[str, Callable[[Run], Series]]]:
        """How to get a metric's series of a run: itself, its highest layer, or one a group."""

        def highest(run: Run) -> Series:
            tokens, values = run.by_layer(metric.quantity)
            return Series(tokens, values.max(axis=1, initial=-np.inf))

        if not metric.name.endswith("*"):
            return [("", lambda run: run.series(metric.name))]
        if any(run.layers(metric.quantity) for run in self.runs):
            return [("", highest)]
        names = {name for run in self.runs for name in run.metrics.columns if metric.covers(name)}
        return [
            (name.partition("/")[2], lambda run, name=name: run.series(name))  # type: ignore[misc]
            for name in sorted(names)
        ]

    def over_tokens(self, pick: Callable[[Run], Series], smooth: bool = False) -> Bands:
        """A series of every run, by row."""
        if not smooth:
            return [bands.band_of(row, pick) for row in self.rows]
        return self.over_tokens(lambda run: bands.smoothed(pick(run), self.smoothed_over))

    def gap(self) -> list[Card]:
        """Held-out loss against the baseline's."""
        curves = [bands.gap_band(row) for row in self.rows]
        caption = (
            "Held-out loss minus that of the baseline's run with the same seeds, in nats a token: "
            "below 0 the row is better than its baseline."
        )
        plot = Curve(f"Gap to {self.baseline}")
        return self.curves(plot, caption, "nats a token", curves, zero=True)

    def second_half(self) -> list[Card]:
        """Training loss behind the middle, where it falls slowly."""
        ends = [run.series("train/loss").tokens.max(initial=0) for run in self.runs]
        half = max(ends) / 2

        def late(run: Run) -> Series:
            tokens, values = bands.smoothed(run.series("train/loss"), self.smoothed_over)
            return Series(tokens[tokens > half], values[tokens > half])

        curves = self.over_tokens(late)
        if sum(len(band.x) for band in curves if band) <= 2 * len(self.rows):
            return []
        caption = "{smoothing}, in nats a token, on a scale of its own.{incomparable}"
        caption = caption.format(**self.fields)
        plot = Curve("Training loss, second half")
        return self.curves(plot, caption, "nats a token", curves, start=half)

    def curves(self, plot: Curve, caption: str, unit: str, curves: Bands, **how: Any) -> list[Card]:
        """One figure over tokens, if there is a value other than 0."""
        values = values_of(curves)
        if not values.any():
            return []
        if plot.spikes is not None:
            counter, what = plot.spikes
            how["spikes"] = [bands.rises(row, counter) for row in self.rows]
            if any(map(len, how["spikes"])):
                caption += (
                    " Strokes below, a lane a row in the legend's order, its seeds together: "
                    f"{what} spiked, by the 128-step definition, since the previous logged step."
                )
        highest, top = float(values.max()), start_of(curves)
        if plot.clip and highest > top:
            how["top"] = top
            caption += f" The scale ends at {short(top)}; values go to {short(highest)}."
        log = plot.log and highest > 0
        drawing = draw_curves(curves, self.styles, unit, log=log, **how)
        return [self.card(plot.title, caption + scale_note(values, log), drawing)]

    def layers(self, plot: Layers, caption: str, metric: Metric) -> list[Card]:
        """One figure over layers, if there is a value other than 0."""
        curves = [bands.at_end(row, metric.quantity) for row in self.rows]
        values = values_of(curves)
        if not values.any():
            return []
        n = self.length if plot.uniform else None
        reference = (n**-0.5, f"1/√n, n = {n:,}") if n else None
        log = plot.log and values.max() > 0
        drawing = draw_layers(curves, self.styles, metric.unit, log, reference)
        return [self.card(plot.title, caption + scale_note(values, log), drawing)]

    def maps(self, title: str, caption: str, quantity: str) -> list[Card]:
        """A panel for every row that logged it."""
        maps = heatmaps(self.rows, quantity)
        if maps is None:
            return []
        panels = []
        for style, grid in zip(self.styles, maps.grids, strict=True):
            if grid is not None and np.isfinite(grid).any():
                label = f"{title}: {style.label}. {ends(grid)}"
                svg = to_svg(draw_map(grid, maps), self.next_name(), self.styles, label)
                panels.append((style, svg))
        caption += f" {maps.scale}{', the same in all panels' if len(panels) > 1 else ''}."
        if len(self.runs) > len(self.rows):
            caption += " Mean over a row's seeds, as far as all of them got."
        return [self.card(title, caption, draw_bar(maps), panels)]

    def card(
        self,
        title: str,
        caption: str,
        drawing: Figure,
        panels: Sequence[tuple[RowStyle, str]] = (),
    ) -> Card:
        """A drawing under a name that the page has once."""
        name = self.next_name()
        return Card(name, title, caption, to_svg(drawing, name, self.styles), panels)

    def next_name(self) -> str:
        self.count += 1
        return f"f{self.count}"


def values_of(curves: Bands) -> np.ndarray:
    """All values that a figure shows."""
    return np.concatenate([np.zeros(0), *(band.drawn for band in curves if band is not None)])


def start_of(curves: Bands) -> float:
    """Just above the highest curve's start: what lies above is a spike or a divergence."""
    drawn = [band.high[np.isfinite(band.high)] for band in curves if band is not None]
    return max((1.05 * float(high[0]) for high in drawn if len(high)), default=np.inf)


def scale_note(drawn: np.ndarray, log: bool) -> str:
    """A sentence about a logarithmic scale."""
    if not log:
        return ""
    left_out = "; values that are not above 0 leave a gap" if drawn.min() <= 0 else ""
    return f" Logarithmic scale{left_out}."


def ends(grid: np.ndarray) -> str:
    """A map in words: its range at the first and last logged time."""
    logged = np.flatnonzero(np.isfinite(grid).any(axis=0))
    first, last = (grid[:, i][np.isfinite(grid[:, i])] for i in (logged[0], logged[-1]))
    return (
        f"From {short(first.min())} to {short(first.max())} over layers at first, "
        f"from {short(last.min())} to {short(last.max())} at last."
    )
