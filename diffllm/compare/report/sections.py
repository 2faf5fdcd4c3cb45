"""The figures of a report, as the table of metrics lists them, and what each says.

A section without data is left out; so is a figure that no run has the metrics for, or only zeros.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup

from diffllm.compare.report import bands
from diffllm.compare.report.budgets import BUDGETS, same_facts, spent_band
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.drawing import FEW, Bands, draw_curves, draw_layers
from diffllm.compare.report.find import shortlist
from diffllm.compare.report.gap_statistics import family, survives
from diffllm.compare.report.groups import keys_apart
from diffllm.compare.report.heatmaps import draw_heatmaps, heatmaps
from diffllm.compare.report.intervals import draw_gaps
from diffllm.compare.report.numbers import short
from diffllm.compare.report.runs import Run, Series
from diffllm.compare.report.style import RowStyle, to_image
from diffllm.compare.report.text import gap_sentence
from diffllm.metrics.metric import Curve, Heatmap, Layers, Metric, Plot, Section
from diffllm.metrics.table import (
    ATTENTION,
    CONTEXT,
    EXPERTS,
    GATE,
    LAMBDA,
    LOSS,
    METRICS,
    NORMS,
    OUTLIERS,
    RESIDUAL,
    SECTIONS,
    SPIKES,
    TASKS,
    metric_of,
)
from diffllm.statistics.gap_tests import ALPHA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDER = (
    TASKS, CONTEXT, LAMBDA, GATE, OUTLIERS, ATTENTION, LOSS, SPIKES, NORMS, RESIDUAL, EXPERTS,
)  # fmt: skip
"""Sections as the report has them: first what attention variants differ in; those of plugins
follow."""
FIRST, LATER = 0.2, 0.95
"""Share of a run that its first steps are, whose loss would flatten the rest of the curve; and
quantile of the values behind them that the scale goes to at least. Curves of few points have no
first steps."""


COSTS_INTRO = (
    "A variant may need more FLOPs or more time for a token. Each curve goes to the end of its own "
    "run; the table has gaps where both rows had spent the same, read off the curves. A run that "
    "is read before its end had not let its learning rate fall to the last value, which counts "
    "against it: model.match_flops_to makes runs that end at equal FLOPs."
)


class Card(NamedTuple):
    """A figure of the page."""

    title: str
    caption: str
    image: Markup
    wide: bool = False
    """Whether it has panels beside each other."""
    folded: bool = False


class PageSection(NamedTuple):
    """Figures on one subject."""

    title: str
    intro: str
    figures: list[Card]
    table: bool = False
    """Whether the table of gaps at equal cost stands above the figures."""

    @property
    def shown(self) -> list[Card]:
        return [card for card in self.figures if not card.folded]

    @property
    def folded(self) -> list[Card]:
        return [card for card in self.figures if card.folded]

    @property
    def folded_title(self) -> str:
        """ "Gradient norm: attention, embedding, ffn"."""
        heads = [card.title.partition(", ") for card in self.folded]
        same = len({head for head, _, _ in heads}) == 1
        return (
            f"{heads[0][0]}: {', '.join(tail for _, _, tail in heads)}" if same else "More figures"
        )


def sections(
    comparison: Comparison, styles: list[RowStyle], hidden: Collection[int] = ()
) -> tuple[list[Card], list[PageSection]]:
    """Draw the figures of the first screen, and the sections that have other figures.

    Args:
        hidden: places of rows that figures do not show.
    """
    draw = Figures(comparison, styles, hidden)
    first = draw.first_screen()
    shown = {card.title for card in first}
    found = []
    if costs := draw.costs():
        found.append(PageSection("At equal cost", COSTS_INTRO, costs, table=True))
    of_plugins = [each for each in SECTIONS if each.report and each not in ORDER]
    for title, group in groupby([*ORDER, *of_plugins], key=lambda section: section.report):
        parts = [(section, draw.cards(section, shown)) for section in group]
        cards = [card for _, cards in parts for card in cards]
        intro = " ".join(section.intro for section, cards in parts if cards and section.intro)
        if cards:
            found.append(PageSection(title, intro.format(**draw.fields), cards))
    return first, found


class Figures:
    """Draws the figures of one comparison."""

    def __init__(
        self, comparison: Comparison, styles: list[RowStyle], hidden: Collection[int] = ()
    ):
        kept = [i for i in range(len(comparison.rows)) if i not in hidden]
        self.rows, self.styles = [comparison.rows[i] for i in kept], [styles[i] for i in kept]
        self.baseline, self.tested = comparison.baseline, len(family(comparison.rows))
        self.runs = [run for row in self.rows for run in row.runs]
        logged = [len(run.series("train/loss").values) for run in self.runs]
        self.smoothed_over = points = bands.window(max(logged))
        lengths = {run.cfg.seq_len for run in self.runs}
        self.length = n = min(lengths) if len(lengths) == 1 else None
        """Tokens a sequence, where all runs agree."""
        keys = shortlist(keys_apart(comparison.groups, list(comparison.differences)), 3)
        self.fields = {
            "smoothing": f"Running mean over {points} logged steps" if points > 1
            else "At logged steps",
            "uniform": f" ({short(n**-0.5)} at n = {n:,})" if n else "",
            "incomparable": f" Rows are not comparable: they differ in {keys}."
            if keys and not hidden else "",
        }  # fmt: skip
        """Texts that the table of metrics leaves open."""

    def first_screen(self) -> list[Card]:
        """Gaps and held-out loss; the curves of losses where there is no gap."""
        if any(row.gap for row in self.rows):
            return [*self.intervals(), *self.of("eval/loss"), *self.gap()]
        return [card for name in ("train/loss", "eval/loss", "train/lr") for card in self.of(name)]

    def of(self, name: str) -> list[Card]:
        metric = metric_of(name)
        return [card for plot in metric.plots for card in self.plot(metric, plot)]

    def cards(self, section: Section, shown: Collection[str]) -> list[Card]:
        """The figures of a section in the order of the table, without the titles in `shown`."""
        cards = [
            card
            for metric in METRICS
            if metric.section is section
            for plot in metric.plots
            if plot.title not in shown
            for card in self.plot(metric, plot)
        ]
        return [*cards, *self.second_half()] if section is LOSS else cards

    def plot(self, metric: Metric, plot: Plot) -> list[Card]:
        """The figures of one entry of the table: one, one a group of parameters, or none."""
        cards = []
        for group, pick in self.series_of(metric):
            fields = {**self.fields, "group": group}
            caption = plot.caption.format(**fields) or f"{metric.meaning}."
            if isinstance(plot, Heatmap):
                cards += self.maps(plot, caption, metric)
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
            (name.removeprefix(f"{metric.quantity}/"), lambda run, name=name: run.series(name))  # type: ignore[misc]
            for name in sorted(names)
        ]

    def over_tokens(self, pick: Callable[[Run], Series], smooth: bool = False) -> Bands:
        if not smooth:
            return [bands.band_of(row, pick) for row in self.rows]
        return self.over_tokens(lambda run: bands.smoothed(pick(run), self.smoothed_over))

    def intervals(self) -> list[Card]:
        """Every gap with its interval."""
        rows = [row for row in self.rows if row.gap]
        styles = [style for row, style in zip(self.rows, self.styles, strict=True) if row.gap]
        hollow = [self.tested > 0 and not survives(row) for row in rows]
        title = f"Gap to {self.baseline} at the end"
        caption = (
            "Held-out loss minus the baseline's, over the seeds that both have: mean, and 95% "
            "interval where there are several. Left of 0 is better; an interval that holds 0 shows "
            "no difference."
        )
        if self.tested > 1:
            caption += (
                f" Filled: survives Holm's correction over the {self.tested} gaps of this page."
            )
        elif self.tested:
            caption += f" Filled: shown at {ALPHA:g}."
        figure = draw_gaps([row.gap for row in rows if row.gap], styles, hollow=hollow)
        return [Card(title, caption, to_image(figure, title, "; ".join(map(gap_sentence, rows))))]

    def gap(self) -> list[Card]:
        """Held-out loss against the baseline's."""
        curves = [bands.gap_band(row) for row in self.rows]
        caption = (
            "Held-out loss minus that of the baseline's run with the same seeds, in nats a token: "
            "below 0 the row is better than its baseline."
        )
        floor = bands.seed_noise(bands.rows_of_gaps(self.rows))
        if floor:
            caption += (
                " Grey: the noise floor, where 95% of gaps between rows of equal expectation would "
                "lie, by the deviation between seeds."
            )
        plot = Curve(f"Gap to {self.baseline} over training")
        return self.curves(plot, caption, "nats a token", curves, zero=True, floor=floor)

    def costs(self) -> list[Card]:
        """Held-out loss over FLOPs and over seconds, where some row has a gap."""
        if not any(row.equal for row in self.rows):
            return []
        cards = []
        for budget in (BUDGETS["flops"], BUDGETS["seconds"]):
            if not same_facts(budget, self.rows):
                continue
            curves = [spent_band(row, budget) for row in self.rows]
            plot = Curve(f"Held-out loss against {budget.unit}", clip=True)
            caption = f"{budget.meaning}.{{incomparable}}".format(**self.fields)
            cards += self.curves(plot, caption, "nats a token", curves, across=budget.unit)
        return cards

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
        values = finite_values(curves)
        if not values.any():
            return []
        if plot.spikes is not None:
            how["spikes"], marks = self.marks(*plot.spikes)
            caption += marks
        highest, top = float(values.max()), top_of(curves)
        if plot.clip and highest > top:
            how["top"] = top
            caption += f" The scale ends at {short(top)}; values go to {short(highest)}."
        log, mark = plot.log and highest > 0, mark_line(plot)
        figure = draw_curves(curves, self.styles, unit, log=log, mark=mark, **how)
        return [card(plot, caption + scale_note(values, log), figure)]

    def marks(self, counter: str, what: str) -> tuple[list[np.ndarray], str]:
        """The tokens at which each row's count of spikes rose, and the sentence about them.

        By the 128-step definition where some run is older than the count of events.
        """
        told = f"an event of {what}, on what is left without its trend"
        if not all(len(run.series(counter).values) for run in self.runs):
            counter = counter.replace("spikes_detrended/", "spikes/")
            told = f"{what} spiked, by the 128-step definition"
        found = [bands.rises(row, counter) for row in self.rows]
        if not any(map(len, found)):
            return found, ""
        return found, (
            " Strokes below, a lane a row in the table's order, its seeds together: "
            f"{told}, since the previous logged step."
        )

    def layers(self, plot: Layers, caption: str, metric: Metric) -> list[Card]:
        """One figure over layers, if there is a value other than 0."""
        curves = [bands.at_end(row, metric.quantity) for row in self.rows]
        values = finite_values(curves)
        if not values.any():
            return []
        mark = mark_line(plot)
        if plot.uniform and self.length:
            mark = (self.length**-0.5, "1/√n")
            caption += " Dotted: uniform attention over a whole sequence."
        log = plot.log and values.max() > 0
        figure = draw_layers(curves, self.styles, metric.unit, log, mark)
        return [card(plot, caption + scale_note(values, log), figure)]

    def maps(self, plot: Heatmap, caption: str, metric: Metric) -> list[Card]:
        """One figure with a panel for every row that logged it."""
        maps = heatmaps(self.rows, metric.quantity)
        if maps is None:
            return []
        drawn = [grid is not None for grid in maps.grids]
        said = [
            f"{style.label}: {map_in_words(grid)}"
            for style, grid in zip(self.styles, maps.grids, strict=True)
            if grid is not None
        ]
        caption += f" {maps.scale}{', the same in all panels' if sum(drawn) > 1 else ''}."
        if len(self.runs) > len(self.rows):
            caption += " Mean over a row's seeds, as far as all of them got."
        image = to_image(draw_heatmaps(maps, self.styles), plot.title, " ".join(said))
        return [Card(plot.title, caption, image, sum(drawn) > 1, plot.folded)]


def card(plot: Plot, caption: str, figure: "Figure") -> Card:
    return Card(plot.title, caption, to_image(figure, plot.title), folded=plot.folded)


def finite_values(curves: Bands) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(band.drawn for band in curves if band is not None)])


def top_of(curves: Bands) -> float:
    """Where the scale of a loss ends, so that its first steps and its spikes do not flatten the
    rest: above all that is left a fifth into a run, nearly all that comes later, and its end."""
    tops = [np.inf]
    end = max((band.x[-1] for band in curves if band is not None), default=0)
    for band in curves:
        if band is None:
            continue
        values = np.fmax(band.high, np.fmax.reduce([band.high, *band.singles]))
        start = FIRST * end if len(band.x) > FEW else 0
        later = values[np.isfinite(values) & (band.x >= start)]
        if len(later):
            tops.append(max(later[0], later[-1], float(np.quantile(later, LATER))))
    seen = finite_values(curves)
    if len(tops) == 1 or not len(seen):
        return np.inf
    top, low = max(tops[1:]), float(seen.min())
    return top + 0.08 * (top - low)


def mark_line(plot: Plot) -> tuple[float, str] | None:
    return None if plot.mark is None else (plot.mark, short(plot.mark))


def scale_note(drawn: np.ndarray, log: bool) -> str:
    """A sentence about a logarithmic scale."""
    if not log:
        return ""
    left_out = "; values that are not above 0 leave a gap" if drawn.min() <= 0 else ""
    return f" Logarithmic scale{left_out}."


def map_in_words(grid: np.ndarray) -> str:
    """A map in words: its range at the first and last logged time."""
    logged = np.flatnonzero(np.isfinite(grid).any(axis=0))
    first, last = (grid[:, i][np.isfinite(grid[:, i])] for i in (logged[0], logged[-1]))
    return (
        f"From {short(first.min())} to {short(first.max())} over layers at first, "
        f"from {short(last.min())} to {short(last.max())} at last."
    )
