"""Sections of a report page. A section shows figures of metrics, in the order of `METRICS`.

A figure is omitted if all its values are 0 or missing. A section without figures is omitted too.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from diffllm.compare.arms.arm import runs_of
from diffllm.compare.arms.budget import BUDGETS
from diffllm.compare.arms.heldout import heldout_text
from diffllm.compare.arms.pages import Block, Figure, FigureGrid, Paragraph, Section
from diffllm.compare.arms.run import EVAL_LOSS, Run, Series
from diffllm.compare.arms.sentences import short
from diffllm.compare.report import curves
from diffllm.compare.report.captions import largest_text, spikes_text
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.figures import Bands, draw_curves, draw_gaps, to_image
from diffllm.compare.report.results import (
    has_gaps,
    has_intervals,
    is_significant,
    noise_floor_note,
    pairing_note,
    sample_range,
    tested_rows,
    trend_sentences,
)
from diffllm.compare.report.rows import keys_apart
from diffllm.compare.report.scales import top_of, value_range
from diffllm.compare.report.step_curves import (
    EVERY_STEP_METRICS,
    INTERVALS,
    RunCurves,
    band_of_values,
    line_without_spikes,
    over_stages,
    run_curves,
    stages_of,
)
from diffllm.compare.report.styles import RowStyle
from diffllm.metrics.metric import Bars, Curve, Layers, Metric, Plot
from diffllm.metrics.panels import sections_by_title
from diffllm.metrics.sections import GAPS
from diffllm.metrics.table import METRICS, metric_of


def page_sections(
    comparison: Comparison, styles: list[RowStyle], hides_groups: bool = False
) -> tuple[list[Figure], list[Section], list[Figure]]:
    """Return the figures at the top of the page, the other sections, and the figures over costs.

    Args:
        hides_groups: whether to draw only the first group of rows.
    """
    draw = Figures(comparison, styles, hides_groups)
    first = draw.stages()
    if has_gaps(draw.rows):
        first += draw.intervals()
        first += draw.cards([metric_of("eval/loss")])
    else:
        first += draw.cards(map(metric_of, ("train/loss", "eval/loss", "train/lr")))
    # A figure at the top of the page is not repeated in its section.
    titles = {card.title for card in first}
    sections = []
    for title, group in sections_by_title().items():
        cards: list[Figure] = []
        intros = []
        for section in group:
            metrics = [metric for metric in METRICS if metric.section is section]
            section_cards = draw.cards(metrics, omitted=titles)
            cards += section_cards
            if section_cards and section.intro:
                intros.append(section.intro.format(**draw.fields))
        if title == GAPS.report:
            cards += draw.gap()
        if cards:
            blocks: list[Block] = [FigureGrid(cards)]
            if intros:
                blocks.insert(0, Paragraph(" ".join(intros)))
            sections.append(Section(title, blocks))
    return first, sections, draw.costs()


class Figures:
    """Draws the figures of a comparison; methods return [] for figures without values."""

    def __init__(self, comparison: Comparison, styles: list[RowStyle], hides_groups: bool):
        self.rows = comparison.rows
        keys = keys_apart(comparison.groups, comparison.differences, 3)
        if hides_groups:
            self.rows = comparison.groups[0].rows
            keys = ""
        # The rows of the first group are the first rows, see `group_arms`.
        self.styles = styles[: len(self.rows)]
        self.baseline = comparison.baseline
        # Holm's correction covers all rows of the page, also those that figures omit.
        self.tested = len(tested_rows(comparison.rows))
        self.runs = runs_of(self.rows)
        most_logged = 0
        steps = 0
        lengths = set()
        for run in self.runs:
            losses = run.series("train/loss")
            most_logged = max(most_logged, len(losses.values))
            steps = max(steps, run.last_step)
            lengths.add(run.cfg.seq_len)
        # All runs share one window, which captions name.
        self.smoothed_over = curves.window(most_logged)
        """Logged steps of a running mean."""
        self.interval = max(1, math.ceil(steps / INTERVALS))
        """Steps per point of the curves of every step."""
        self.smoothed_intervals = curves.window(steps // self.interval)
        self.curves_by_run: dict[Run, RunCurves] = {}
        self.length = lengths.pop() if len(lengths) == 1 else None
        """Tokens per sequence; None if runs differ."""
        self.fields = self.text_fields(keys)

    def text_fields(self, keys: str) -> dict[str, str]:
        """Return the values of the placeholders in texts of the table of metrics.

        Args:
            keys: keys in which the shown groups of rows differ, as text.
        """
        pairing = pairing_note(self.rows, "Bands", sample_range)
        smoothing = "At logged steps"
        if self.smoothed_over > 1:
            smoothing = f"Running mean over {self.smoothed_over} logged steps"
        uniform = ""
        if self.length:
            share = short(self.length**-0.5)
            uniform = f" ({share} at n = {self.length:,})"
        return {
            "heldout": heldout_text(self.runs),
            "pairing": f" {pairing}" if pairing else "",
            "smoothing": smoothing,
            "uniform": uniform,
            "incomparable": f" Rows are not comparable: they differ in {keys}." if keys else "",
        }

    def cards(self, metrics: Iterable[Metric], omitted: Collection[str] = ()) -> list[Figure]:
        """Draw the plots of metrics, except those with a title in `omitted`."""
        cards = []
        for metric in metrics:
            for plot in metric.plots:
                if plot.title not in omitted:
                    cards += self.plot(metric, plot)
        return cards

    def plot(self, metric: Metric, plot: Plot) -> list[Figure]:
        if isinstance(plot, Bars):
            return []
        if isinstance(plot, Layers):
            return self.layers(plot, metric)
        assert isinstance(plot, Curve)
        if metric.name in EVERY_STEP_METRICS:
            return self.every_step(plot, metric)
        points = self.smoothed_over if plot.smooth else 1
        cards = []
        for group, read_series in self.series_of(metric):
            # Each group has a figure, whose title differs from that of the other groups.
            titled = replace(plot, title=plot.title.format(group=group))
            caption = plot.caption.format(**self.fields, group=group) or f"{metric.meaning}."
            if metric.name.endswith("*") and not group:
                caption += " The value of the layer with the highest value at each step."
            bands = []
            for row in self.rows:
                smooth = []
                for run in row.runs:
                    series = read_series(run)
                    smooth.append(curves.smoothed(series, points))
                bands.append(curves.over_seeds(smooth))
            cards += self.card(titled, caption, metric.unit, bands)
        return cards

    def every_step(self, plot: Curve, metric: Metric) -> list[Figure]:
        """Draw a metric that steps.npy contains."""
        fields = self.fields | {"smoothing": self.smoothing_text()}
        caption = plot.caption.format(**fields) or f"{metric.meaning}."
        bands = []
        for row in self.rows:
            curves_of_row = [self.curves_of(run) for run in row.runs]
            bands.append(self.step_band(plot, metric.name, curves_of_row))
        if plot.smooth and self.has_every_step():
            caption += " Area: lowest to highest step."
        elif self.interval > 1 and self.has_every_step():
            caption += f" Line: mean over {self.interval:,} steps; area: lowest to highest."
        return self.card(plot, caption, metric.unit, bands)

    def curves_of(self, run: Run) -> RunCurves:
        """Return the curves of a run; steps.npy and events.jsonl are read once for all figures."""
        if run not in self.curves_by_run:
            self.curves_by_run[run] = run_curves(run, self.interval)
        return self.curves_by_run[run]

    def has_every_step(self) -> bool:
        return any(self.curves_of(run).every_step for run in self.runs)

    def smoothing_text(self) -> str:
        if not self.has_every_step():
            return self.fields["smoothing"]
        steps = self.smoothed_intervals * self.interval
        text = f"Running mean over {steps:,} steps" if steps > 1 else "At every step"
        if not all(self.curves_of(run).every_step for run in self.runs):
            text += f" (some runs: {self.smoothed_over} logged steps)"
        return text

    def step_band(self, plot: Curve, name: str, runs: list[RunCurves]) -> curves.Band | None:
        """Return the band of a metric of steps.npy over the runs of a row."""
        lines = []
        curves_of_runs = [run.curves[name] for run in runs]
        for run, curve in zip(runs, curves_of_runs, strict=True):
            line = Series(curve.tokens, curve.mean)
            if plot.smooth:
                points = self.smoothed_intervals if run.every_step else self.smoothed_over
                # A running mean would show a spike as a plateau as wide as its window.
                line = curves.smoothed(line_without_spikes(curve), points)
            lines.append(line)
        return band_of_values(lines, curves_of_runs)

    def series_of(self, metric: Metric) -> list[tuple[str, Callable[[Run], Series]]]:
        """Return pairs of a name and a function that reads the curve of a run.

        A metric of all layers or groups has one curve per group, or that of the highest layer.
        """
        if not metric.name.endswith("*"):
            return [("", methodcaller("series", metric.name))]
        if any(run.layers(metric.quantity) for run in self.runs):
            return [("", partial(highest_layer, metric.quantity))]
        names: set[str] = set()
        for run in self.runs:
            names.update(filter(metric.covers, run.metrics.columns))
        series_of_groups: list[tuple[str, Callable[[Run], Series]]] = []
        for name in sorted(names):
            group = name.removeprefix(f"{metric.quantity}/")
            # Not a lambda, which would read the last name of the loop.
            series_of_groups.append((group, methodcaller("series", name)))
        return series_of_groups

    def stages(self) -> list[Figure]:
        """Draw the training loss over all stages, if a run continues another run."""
        stages_by_run = {}
        starts: set[float] = set()
        for run in self.runs:
            stages = stages_of(run)
            stages_by_run[run.path] = stages
            for _, tokens_before in stages:
                starts.add(tokens_before)
        starts.discard(0)  # the start of training is not the start of a later stage
        if not starts:
            return []
        plot = Curve("Loss over all stages", smooth=True, clip=True)
        bands = []
        for row in self.rows:
            joined = []
            for run in row.runs:
                stages = stages_by_run[run.path]
                joined.append(self.loss_over_stages(stages))
            bands.append(self.step_band(plot, "train/loss", joined))
        caption = (
            "Training loss of each run after its earlier stages, over the tokens of all stages."
        )
        return self.card(plot, caption, "nats per token", bands, starts=sorted(starts))

    def loss_over_stages(self, stages: list[tuple[Run, int]]) -> RunCurves:
        losses = []
        starts = []
        for run, start in stages:
            curves_of_stage = self.curves_of(run)
            losses.append(curves_of_stage.curves["train/loss"])
            starts.append(start)
        joined = over_stages(losses, starts)
        # `stages_of` ends with the run of the row, whose kind of steps decides the running mean.
        return RunCurves({"train/loss": joined}, curves_of_stage.every_step)

    def intervals(self) -> list[Figure]:
        """Draw the gap of each row at the end of training, with its interval."""
        gaps = []
        styles = []
        hollow = []
        for row, style in zip(self.rows, self.styles, strict=True):
            if row.gap:
                gaps.append(row.gap)
                styles.append(style)
                hollow.append(not is_significant(row))
        title = f"Gap to {self.baseline} at the end"
        caption = "Held-out loss minus the baseline's. Left of 0 is better."
        if has_intervals(self.rows):
            caption = (
                "Held-out loss minus the baseline's over common seeds: mean and 95% interval. Left "
                "of 0 is better; an interval that contains 0 shows no difference."
            )
        if self.tested == 1:
            caption += " Filled: significant."
        elif self.tested:
            caption += (
                " Filled: significant after Holm's correction over the "
                f"{self.tested} gaps of this page."
            )
        figure = draw_gaps(gaps, styles, hollow=hollow if self.tested else ())
        return [Figure(title, caption, to_image(figure, title))]

    def gap(self) -> list[Figure]:
        """Draw the gaps during training, with the noise floor."""
        bands = [curves.gap_band(row) for row in self.rows]
        caption = "Held-out sample loss minus the baseline's at equal seeds; below 0 is better."
        rows = curves.rows_of_gaps(self.rows)
        floor = curves.seed_noise(rows)
        if floor:
            caption += " Noise floor: range of 95% of gaps between rows of equal expected loss. "
            caption += noise_floor_note(self.rows, floor)
        for sentence in trend_sentences(self.rows):
            caption += f" {sentence}"
        plot = Curve(f"Gap to {self.baseline} over training")
        return self.card(plot, caption, "nats per token", bands, floor=floor)

    def costs(self) -> list[Figure]:
        """Draw the held-out sample loss over tokens, FLOPs and seconds, if rows have gaps."""
        if not has_gaps(self.rows):
            return []
        cards = []
        for budget in BUDGETS.values():
            bands = []
            for row in self.rows:
                losses = [run.series(EVAL_LOSS) for run in row.runs]
                band = curves.over_seeds(losses)
                if band is not None:
                    band = curves.over_cost(band, row.runs, budget)
                bands.append(band)
            plot = Curve(f"Loss over {budget.unit}", clip=True)
            caption = f"Held-out sample loss. {budget.meaning}."
            cards += self.card(plot, caption, "nats per token", bands, across=budget.unit)
        return cards

    def layers(self, plot: Layers, metric: Metric) -> list[Figure]:
        caption = plot.caption.format(**self.fields) or f"{metric.meaning}."
        bands = [curves.at_end(row, metric.quantity) for row in self.rows]
        mark = None
        if plot.uniform and self.length:
            mark = self.length**-0.5, "1/√n"
            caption += " Dotted: uniform attention over a whole sequence."
        return self.card(plot, caption, metric.unit, bands, across="layer", mark=mark)

    def card(
        self, plot: Curve | Layers, caption: str, unit: str, bands: Bands, **options: Any
    ) -> list[Figure]:
        """Draw `bands` in one figure; return [figure], or [] if all values are 0 or missing.

        Args:
            options: additional keyword arguments for `draw_curves`.
        """
        drawn = [band for band in bands if band is not None]
        if not any(band.drawn.any() for band in drawn):
            return []
        low, high = value_range(drawn)
        top = top_of(drawn)
        caption += spikes_text(plot, drawn)
        if isinstance(plot, Curve) and plot.clip and high > top > low:
            options["top"] = top
            caption += f" The scale ends at {short(top)}; {largest_text(drawn)}."
        # matplotlib cannot scale an axis without positive values logarithmically.
        log = plot.log and high > 0
        if log:
            omitted = ", which omits values of 0 or below" if low <= 0 else ""
            caption += f" Logarithmic scale{omitted}."
        if plot.mark is not None:
            options["mark"] = (plot.mark, f"{unit} {short(plot.mark)}")
        figure = draw_curves(bands, self.styles, unit, log=log, **options)
        image = to_image(figure, plot.title)
        return [Figure(plot.title, caption, image, plot.folded)]


def highest_layer(quantity: str, run: Run) -> Series:
    """Return the highest value over the layers of a metric that is logged per layer."""
    tokens, values = run.by_layer(quantity)
    return Series(tokens, values.max(axis=1, initial=-np.inf))
