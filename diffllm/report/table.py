"""The main table: a row of the report a row, every number with what it is uncertain by."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup

from diffllm.report.columns import COLUMNS
from diffllm.report.comparison import Comparison, Estimate, Row
from diffllm.report.numbers import MISSING, compact, fixed, number, percent, short
from diffllm.report.style import MUTED, RowStyle, new_figure, to_svg

FOREST_WIDTH, FOREST_HEIGHT = 132, 18
OUTLYING = 4
"""Times the median reach of a gap and its interval that the scale of all goes to at most."""


@dataclass(frozen=True)
class Cell:
    """What stands in one place."""

    text: str
    order: float | str | None = None
    """What sorting goes by; None comes last."""
    detail: str = ""
    """In small print: the interval, the count behind a share."""
    tag: str = ""
    """What to know about the number: "no difference shown", "1 of 3 seeds diverged"."""
    forest: Markup | None = None


@dataclass(frozen=True)
class Column:
    """A header and the cell of every row."""

    title: str
    unit: str
    hint: str
    cells: list[Cell]


def table_columns(comparison: Comparison, styles: list[RowStyle]) -> list[Column]:
    """All that some row has a value for; labels not included."""
    rows = comparison.rows

    def column(title: str, unit: str, names: str, cells: list[Cell]) -> Column:
        return Column(title, unit, hint(names.split()), cells)

    def plain(title: str, unit: str, name: str, how: Callable[[Any], str]) -> Column:
        return column(title, unit, name, [plain_cell(row.values.get(name), how) for row in rows])

    def spikes(title: str, unit: str, name: str) -> Column:
        cells = [spike_cell(row, name) for row in rows]
        return column(title, unit, f"{name}_score {name}_total", cells)

    small, window, olmo = partial(short, digits=3), "128 steps", "OLMo 2"
    made = [
        column("Held-out loss", loss_unit(comparison), "loss", [loss_cell(row) for row in rows]),
        column(
            f"Gap to {comparison.baseline}",
            unit([row.gap for row in rows], "95% interval, paired"),
            "gap",
            gap_cells(rows, styles),
        ),
        column("Parameters", "", "parameters active_parameters", [size_cell(row) for row in rows]),
        plain("FLOPs", "per token", "flops_per_token", compact),
        plain("Tokens", "", "tokens", compact),
        column("Seeds", "", "seeds", [seeds_cell(row) for row in rows]),
        spikes("Loss spikes", window, "spikes/loss"),
        spikes("Gradient spikes", window, "spikes/grad"),
        spikes("Loss spikes", olmo, "spikes_olmo2/loss"),
        spikes("Gradient spikes", olmo, "spikes_olmo2/grad"),
        plain("Skipped", "updates", "spikes/skipped_total", small),
        plain("Gradient norm", "largest", "train/grad_norm", small),
        plain("Outlier", "largest |value|", "hidden_top1", small),
        plain("Kurtosis", "over channels", "hidden_kurtosis", small),
        column(
            "Context RMS",
            "smallest to largest",
            "context_rms_min context_rms_max",
            [context_cell(row) for row in rows],
        ),
        plain("Speed", "tokens/s", "perf/tokens_per_s", small),
        plain("MFU", "", "perf/mfu", percent),
    ]
    return [c for c in made if any(cell != Cell(MISSING) for cell in c.cells)]


def hint(names: list[str]) -> str:
    """What these columns of the CSV mean."""
    if len(names) == 1:
        return COLUMNS[names[0]]
    return "; ".join(f"{name}: {COLUMNS[name]}" for name in names)


def unit(estimates: list[Estimate | None], kind: str) -> str:
    """Of losses, with the kind of interval if there is one."""
    sure = any(estimate and in_words(estimate) for estimate in estimates)
    return f"nats a token, {kind}" if sure else "nats a token"


def loss_unit(comparison: Comparison) -> str:
    """With what forbids sorting by it."""
    keys = ", ".join(difference.key for difference in comparison.differences)
    plain = unit([row.loss for row in comparison.rows], "95% interval")
    return f"{plain}; not comparable across {keys}" if keys else plain


def plain_cell(value: Any, how: Callable[[Any], str]) -> Cell:
    """A number; one that is NaN or infinite is not the same as none."""
    odd = value is not None and number(value) is None
    return Cell(how(value), number(value), tag="not finite" if odd else "")


def size_cell(row: Row) -> Cell:
    """Total parameters, active ones below where they differ."""
    total, active = (row.values.get(name) for name in ("parameters", "active_parameters"))
    detail = f"{compact(active)} active" if number(active) and active != total else ""
    return Cell(compact(total), number(total), detail)


def seeds_cell(row: Row) -> Cell:
    """Of all runs, how many the loss is the mean of."""
    seeds, runs = number(row.values.get("seeds")), len(row.runs)
    text = short(seeds) if seeds == runs else f"{short(seeds or 0)} of {runs}"
    return Cell(text, seeds)


def loss_cell(row: Row) -> Cell:
    """A mean with its interval, and how many seeds are not in it."""
    tag = diverged(row)
    if row.loss is None or number(row.loss.mean) is None:
        return Cell(MISSING, tag=tag or ("not finite" if row.loss else ""))
    return Cell(fixed(row.loss.mean), row.loss.mean, in_words(row.loss), tag)


def diverged(row: Row, of: str = "") -> str:
    """ "1 of 3 seeds diverged"; nothing if none did."""
    finished = sum(run.summary is not None for run in row.runs)
    return f"{row.diverged} of {finished} seeds{of} diverged" if row.diverged else ""


def in_words(estimate: Estimate, signed: bool = False) -> str:
    """Its 95% interval in words; nothing from a single seed."""
    if number(estimate.low) is None or number(estimate.high) is None:
        return ""
    low, high = (fixed(x, signed=signed) for x in (estimate.low, estimate.high))
    return f"{low} to {high}"


def gap_cells(rows: list[Row], styles: list[RowStyle]) -> list[Cell]:
    """Gaps on one scale, zero included, so that they can be compared by eye; none without a gap."""
    limit = forest_limit([row.gap for row in rows if row.gap and number(row.gap.mean) is not None])
    if limit is None:
        return [Cell(MISSING) for _ in rows]
    baselines = {id(row.baseline) for row in rows}
    return [
        gap_cell(row, id(row) in baselines, style, limit)
        for row, style in zip(rows, styles, strict=True)
    ]


def forest_limit(gaps: list[Estimate]) -> float | None:
    """How far the scale goes on either side of zero.

    By the gaps over the most seeds, since an interval of two alone is many times as wide, and
    without outliers among them; what lies beyond is drawn as an arrow. None without gaps.
    """
    most = max((gap.seeds for gap in gaps), default=0)
    reaches = [reach(gap) for gap in gaps if gap.seeds == most]
    if not reaches:
        return None
    return 1.1 * min(max(reaches), OUTLYING * statistics.median(reaches)) or 1.0


def reach(gap: Estimate) -> float:
    """The largest magnitude of a gap's mean and interval."""
    ends = (number(x) for x in (gap.mean, gap.low, gap.high))
    return max(abs(x) for x in ends if x is not None)


def gap_cell(row: Row, is_baseline: bool, style: RowStyle, limit: float) -> Cell:
    """A gap, its interval, the same as a figure, and whether it shows a difference.

    Args:
        is_baseline: whether the gap of another row is measured from this one.
    """
    gap = row.gap
    if gap is None or number(gap.mean) is None:
        return Cell("", tag="baseline") if is_baseline else Cell(MISSING)
    bounds = in_words(gap, signed=True)
    tag = diverged(row)
    if not tag and row.baseline is not None:
        tag = diverged(row.baseline, f" of {row.baseline.label}")
    if not tag and not bounds:
        tag = "no interval from one seed" if gap.seeds == 1 else "no interval"
    if not tag and gap.low is not None and gap.high is not None and gap.low <= 0 <= gap.high:
        tag = "no difference shown"
    return Cell(fixed(gap.mean, signed=True), gap.mean, bounds, tag, forest(gap, style, limit))


def forest(gap: Estimate, style: RowStyle, limit: float) -> Markup:
    """The mean as a dot on its interval, zero as a line in the middle; arrows beyond the scale."""
    figure = new_figure(FOREST_WIDTH, FOREST_HEIGHT)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-limit, limit)
    axes.set_ylim(-1, 1)
    axes.plot((0, 0), (-1, 1), color=MUTED, linewidth=1)
    ends = [x for x in (number(gap.low), number(gap.high)) if x is not None]
    shown = [max(-limit, min(x, limit)) for x in ends]
    axes.plot(shown, [0.0] * len(shown), color=style.colour, linewidth=2.2)
    if abs(gap.mean) <= limit:
        axes.plot(gap.mean, 0, "o", color=style.colour, markersize=6.5)
    for side, arrow in ((-1, "<"), (1, ">")):
        if any(side * x > limit for x in (gap.mean, *ends)):
            axes.plot(side * 0.95 * limit, 0, arrow, color=style.colour, markersize=7)
    label = f"{fixed(gap.mean, signed=True)}, {in_words(gap, True) or 'no interval'}"
    return Markup(to_svg(figure, f"gap{style.index}", [style], label))


def spike_cell(row: Row, name: str) -> Cell:
    """The share of steps, and how many they were."""
    score, total = row.values.get(f"{name}_score"), row.values.get(f"{name}_total")
    count = f"{short(total)} {'step' if total == 1 else 'steps'}" if number(total) else ""
    return Cell(percent(score), number(score), count)


def context_cell(row: Row) -> Cell:
    """Smallest to largest; sorted by the largest."""
    low, high = row.values.get("context_rms_min"), row.values.get("context_rms_max")
    if number(low) is None and number(high) is None:
        return Cell(MISSING)
    return Cell(f"{short(low, 2)} to {short(high, 2)}", number(high))
