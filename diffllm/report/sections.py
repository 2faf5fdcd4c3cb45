"""The figures of a report, as the table of metrics lists them, and what each says.

A section without data is left out; so is a figure that no run has the metrics for, or only zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Drawing

from diffllm.metrics.metric import Curve, Heatmap, Layers, Metric, Plot, Section
from diffllm.metrics.table import LOSS, METRICS, SECTIONS
from diffllm.report import bands
from diffllm.report.comparison import Comparison
from diffllm.report.drawing import Bands, draw_bar, draw_curves, draw_layers, draw_map, maps_of
from diffllm.report.numbers import short
from diffllm.report.runs import Run, Series
from diffllm.report.style import RowStyle, to_svg


@dataclass(frozen=True)
class Panel:
    """One map among several."""

    style: RowStyle
    svg: str


@dataclass(frozen=True)
class Card:
    """A figure of the page: one drawing, or a panel a row under a shared colour bar."""

    name: str
    """Its title has the id `name`-title."""
    title: str
    caption: str
    svg: str
    panels: Sequence[Panel] = ()

    @property
    def abreast(self) -> int:
        """Panels side by side where there is room, so that few places stay empty."""
        n = len(self.panels)
        return min(range(min(n, 3), 6), key=lambda columns: (-n % columns, -columns), default=1)


@dataclass(frozen=True)
class PageSection:
    """Figures on one subject."""

    title: str
    intro: str
    figures: list[Card]

    @property
    def halves(self) -> int:
        """How many single drawings, the first, are half as wide as the page; the others a third.

        So that no row of the page has an empty place.
        """
        single = sum(not figure.panels for figure in self.figures)
        return min(single, {0: 0, 1: 4, 2: 2}[single % 3])


def sections(comparison: Comparison, styles: list[RowStyle]) -> list[PageSection]:
    """The sections that have a figure; neighbours that share a title are one."""
    draw = Figures(comparison, styles)
    parts: list[list[tuple[Section, list[Card]]]] = []
    for section in SECTIONS:
        figures = [
            card
            for metric in METRICS
            if metric.section is section
            for plot in metric.plots
            for card in draw.plot(metric, plot)
        ]
        if section is LOSS:
            figures += draw.gap() + draw.second_half()
        if figures and parts and shares_title(section, parts[-1][-1][0]):
            parts[-1].append((section, figures))
        elif figures:
            parts.append([(section, figures)])
    return [draw.page_section(part) for part in parts]


def shares_title(one: Section, other: Section) -> bool:
    return one.report == other.report or one.dashboard == other.dashboard


class Figures:
    """Draws the figures of one comparison."""

    def __init__(self, comparison: Comparison, styles: list[RowStyle]):
        self.rows, self.styles, self.baseline = comparison.rows, styles, comparison.baseline
        self.runs = [run for row in self.rows for run in row.runs]
        self.count = 0
        logged = [len(run.series("train/loss").values) for run in self.runs]
        self.smoothed_over = points = bands.window(max(logged, default=0))
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

    def page_section(self, parts: list[tuple[Section, list[Card]]]) -> PageSection:
        """Sections of the table as one of the page."""
        first, *others = dict.fromkeys(section.report for section, _ in parts)
        title = " and ".join([first, *map(str.lower, others)])
        intros = [section.intro.format(**self.fields) for section, _ in parts]
        sections = [section for section, _ in parts]
        plots = [plot for m in METRICS if m.section in sections for plot in m.plots]
        if any(isinstance(plot, Layers) for plot in plots):
            intros.append(self.by_layer())
        figures = [figure for _, figures in parts for figure in figures]
        return PageSection(title, " ".join(filter(None, intros)), figures)

    def by_layer(self) -> str:
        """Which runs and step the figures over layers show."""
        none = [row.label for row in self.rows if not row.finished]
        finished = "Figures by layer show finished runs at the last logged step"
        if not none:
            return f"{finished}."
        common = "at the last logged step that its runs have in common"
        if len(none) == len(self.rows):
            return f"No run has finished: figures by layer show each row {common}."
        return f"{finished}; of {', '.join(none)}, without a finished run, all runs {common}."

    def plot(self, metric: Metric, plot: Plot) -> list[Card]:
        """The figures of one entry of the table: one, one a group of parameters, or none."""
        if isinstance(plot, Heatmap):
            return self.maps(plot.title, self.caption(metric, plot), metric.quantity)
        if isinstance(plot, Layers):
            curves = [bands.at_end(row, metric.quantity) for row in self.rows]
            n = self.length if plot.uniform else None
            reference = (n**-0.5, f"1/√n, n = {n:,}") if n else None
            caption = self.caption(metric, plot)
            return self.layers(plot.title, caption, curves, metric.unit, plot.log, reference)
        assert isinstance(plot, Curve)
        return [
            card
            for group, pick in self.series_of(metric)
            for card in self.curves(
                plot.title.format(group=group),
                self.caption(metric, plot, group),
                self.over_tokens(pick, plot.smooth),
                metric.unit,
                plot.log,
                plot.clip,
                plot.spikes,
            )
        ]

    def gap(self) -> list[Card]:
        """Held-out loss against the baseline's."""
        curves = [bands.gap_band(row) for row in self.rows]
        caption = (
            "Held-out loss minus that of the baseline's run with the same seeds, in nats a token: "
            "below 0 the row is better than its baseline."
        )
        return self.curves(f"Gap to {self.baseline}", caption, curves, "nats a token", zero=True)

    def second_half(self) -> list[Card]:
        """Training loss behind the middle, where it falls slowly."""
        train = self.over_tokens(lambda run: run.series("train/loss"), smooth=True)
        half = max((float(band.x[-1]) for band in train if band is not None), default=0) / 2
        late = [band and band.since(half) for band in train]
        if sum(len(band.x) for band in late if band) <= 2 * len(self.rows):
            return []
        caption = "{smoothing}, in nats a token, on a scale of its own.{incomparable}"
        caption = caption.format(**self.fields)
        return self.curves("Training loss, second half", caption, late, "nats a token", start=half)

    def caption(self, metric: Metric, plot: Plot, group: str = "") -> str:
        """The caption of an entry of the table, without gaps."""
        return (plot.caption or f"{metric.meaning}.").format(**self.fields, group=group)

    def series_of(self, metric: Metric) -> list[tuple[str, Callable[[Run], Series]]]:
        """How to get a metric's series of a run: itself, its highest layer, or one a group."""
        if not metric.name.endswith("*"):
            return [("", lambda run: run.series(metric.name))]
        if any(run.layers(metric.quantity) for run in self.runs):
            return [("", lambda run: bands.largest(run.by_layer(metric.quantity)))]
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

    def curves(
        self,
        title: str,
        caption: str,
        curves: Bands,
        unit: str,
        log: bool = False,
        clip: bool = False,
        spikes: tuple[str, str] | None = None,
        **how: Any,
    ) -> list[Card]:
        """One figure over tokens, if there is a value other than 0; options as in `Curve`."""
        drawn = values_of(curves)
        if not drawn.any():
            return []
        if spikes is not None:
            counter, what = spikes
            how["spikes"] = [bands.rises(row, counter) for row in self.rows]
            if any(map(len, how["spikes"])):
                caption += (
                    " Strokes below, a lane a row in the legend's order, its seeds together: "
                    f"{what} spiked, by the 128-step definition, since the previous logged step."
                )
        highest, top = float(drawn.max()), start_of(curves) if clip else None
        if top is not None and highest > top:
            how["top"] = top
            caption += f" The scale ends at {short(top)}; values go to {short(highest)}."
        log = log and highest > 0
        drawing = draw_curves(curves, self.styles, unit, log=log, **how)
        return [self.card(title, caption + scale_note(drawn, log), drawing)]

    def layers(
        self,
        title: str,
        caption: str,
        curves: Bands,
        unit: str,
        log: bool,
        reference: tuple[float, str] | None,
    ) -> list[Card]:
        """One figure over layers, if there is a value other than 0."""
        drawn = values_of(curves)
        if not drawn.any():
            return []
        log = log and drawn.max() > 0
        drawing = draw_layers(curves, self.styles, unit, log=log, reference=reference)
        return [self.card(title, caption + scale_note(drawn, log), drawing)]

    def maps(self, title: str, caption: str, quantity: str) -> list[Card]:
        """A panel for every row that logged it."""
        maps = maps_of(self.rows, quantity)
        if maps is None:
            return []
        panels = []
        for style, values in zip(self.styles, maps.values, strict=True):
            if values is not None and np.isfinite(values).any():
                label = f"{title}: {style.label}. {ends(values)}"
                svg = to_svg(draw_map(values, maps), self.next_name(), self.styles, label)
                panels.append(Panel(style, svg))
        kind = maps.scale.kind
        colour = f"colour on {kind}" if maps.scale.colours == "viridis" else kind
        caption += f" {colour.capitalize()}"
        caption += ", the same in all panels." if len(panels) > 1 else "."
        if any(len(row.runs) > 1 for row in self.rows):
            caption += " Mean over a row's seeds, as far as all of them got."
        return [self.card(title, caption, draw_bar(maps), panels)] if panels else []

    def card(
        self, title: str, caption: str, drawing: Drawing, panels: Sequence[Panel] = ()
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


def start_of(curves: Bands) -> float | None:
    """Just above the highest curve's start: what lies above is a spike or a divergence."""
    drawn = [band.high[np.isfinite(band.high)] for band in curves if band is not None]
    starts = [float(high[0]) for high in drawn if len(high)]
    return 1.05 * max(starts) if starts else None


def scale_note(drawn: np.ndarray, log: bool) -> str:
    """A sentence about a logarithmic scale."""
    if not log:
        return ""
    left_out = "; values that are not above 0 leave a gap" if drawn.min() <= 0 else ""
    return f" Logarithmic scale{left_out}."


def ends(values: np.ndarray) -> str:
    """A map in words: its range at the first and last logged time."""
    logged = np.flatnonzero(np.isfinite(values).any(axis=0))
    first, last = (values[:, i][np.isfinite(values[:, i])] for i in (logged[0], logged[-1]))
    return (
        f"From {short(first.min())} to {short(first.max())} over layers at first, "
        f"from {short(last.min())} to {short(last.max())} at last."
    )
