"""The main table: a row of the report a row, every number with what it is uncertain by."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup

from diffllm.report.comparison import Comparison, Estimate, Row
from diffllm.report.numbers import MISSING, compact, fixed, number, percent, short
from diffllm.report.style import MUTED, RowStyle, new_figure, to_svg

FOREST_WIDTH, FOREST_HEIGHT = 132, 18


@dataclass(frozen=True)
class Cell:
    """What stands in one place."""

    text: str
    order: float | str | None = None
    """What sorting goes by; None comes last."""
    detail: str = ""
    """In small print: the interval, the count behind a share."""
    tag: str = ""
    """A verdict on the number: "no difference shown", "not finite"."""
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

    def plain(name: str, how: Callable[[Any], str]) -> list[Cell]:
        return [plain_cell(row.values.get(name), how) for row in rows]

    def spikes(name: str) -> list[Cell]:
        return [spike_cell(row, name) for row in rows]

    sure = any(row.loss and in_words(row.loss) for row in rows)
    small, window, olmo = partial(short, digits=3), "128 steps", "OLMo 2"
    every = "Share of steps, and their number"
    made = [
        Column(
            "Held-out loss", "nats a token, 95% interval" if sure else "nats a token",
            "Mean over seeds",
            [estimate_cell(row.loss) for row in rows],
        ),
        Column(
            f"Gap to {comparison.baseline}", "nats a token, 95% interval, paired",
            "Held-out loss minus the baseline's; negative is better", gaps(comparison, styles),
        ),
        Column(
            "Parameters", "", "All parameters; active ones below where they are fewer",
            [size(row) for row in rows],
        ),
        Column(
            "FLOPs", "per token", "Training FLOPs, forward and backward",
            plain("flops_per_token", compact),
        ),
        Column("Tokens", "", "Training tokens a run", plain("tokens", compact)),
        Column("Seeds", "", "Runs with different seeds", plain("seeds", small)),
        Column("Loss spikes", window, f"{every}; window128", spikes("spikes/loss")),
        Column("Loss spikes", olmo, f"{every}; olmo2", spikes("spikes_olmo2/loss")),
        Column("Gradient spikes", window, f"{every}; window128", spikes("spikes/grad")),
        Column("Gradient spikes", olmo, f"{every}; olmo2", spikes("spikes_olmo2/grad")),
        Column(
            "Skipped", "updates", "Updates left out: not finite, or a spike",
            plain("spikes/skipped_total", small),
        ),
        Column(
            "Gradient norm", "largest", "Largest of logged steps, before clipping",
            plain("train/grad_norm", small),
        ),
        Column(
            "Outlier", "largest |value|", "Of any block's output, over all diagnosed steps",
            plain("hidden_top1", small),
        ),
        Column(
            "Kurtosis", "over channels", "Largest of the blocks' outputs, at the end",
            plain("hidden_kurtosis", small),
        ),
        Column(
            "Context RMS", "smallest to largest", "Over layers, tokens and heads, at the end",
            [context_cell(row) for row in rows],
        ),
        Column("Speed", "tokens/s", "Median of logged steps", plain("perf/tokens_per_s", small)),
        Column("MFU", "", "Model FLOPs utilisation", plain("perf/mfu", percent)),
    ]  # fmt: skip
    return [c for c in made if any(cell != Cell(MISSING) for cell in c.cells)]


def plain_cell(value: Any, how: Callable[[Any], str]) -> Cell:
    """A number; one that is NaN or infinite is not the same as none."""
    odd = value is not None and number(value) is None
    return Cell(how(value), number(value), tag="not finite" if odd else "")


def size(row: Row) -> Cell:
    """Total parameters, active ones below where they differ."""
    total, active = (row.values.get(name) for name in ("parameters", "active_parameters"))
    detail = f"{compact(active)} active" if number(active) and active != total else ""
    return Cell(compact(total), number(total), detail)


def estimate_cell(estimate: Estimate | None) -> Cell:
    """A mean with its interval."""
    if estimate is None or number(estimate.mean) is None:
        return Cell(MISSING, tag="not finite" if estimate else "")
    return Cell(fixed(estimate.mean), estimate.mean, in_words(estimate))


def in_words(estimate: Estimate, signed: bool = False) -> str:
    """Its 95% interval in words; nothing from a single seed."""
    if number(estimate.low) is None or number(estimate.high) is None:
        return ""
    low, high = (fixed(x, signed=signed) for x in (estimate.low, estimate.high))
    return f"{low} to {high}"


def gaps(comparison: Comparison, styles: list[RowStyle]) -> list[Cell]:
    """Gaps on one scale, zero included, so that they can be compared by eye."""
    shown = [row.gap for row in comparison.rows if row.gap and number(row.gap.mean) is not None]
    reached = [number(x) for gap in shown for x in (gap.mean, gap.low, gap.high)]
    limit = 1.1 * max((abs(x) for x in reached if x is not None), default=0)
    return [
        gap_cell(row, comparison.baseline, style, limit or 1)
        for row, style in zip(comparison.rows, styles, strict=True)
    ]


def gap_cell(row: Row, baseline: str | None, style: RowStyle, limit: float) -> Cell:
    """A gap, its interval, the same as a figure, and whether it shows a difference."""
    gap = row.gap
    if gap is None or number(gap.mean) is None:
        is_baseline = bool(row.runs) and row.runs[0].variant == baseline
        return Cell("", tag="baseline") if is_baseline else Cell(MISSING)
    bounds = in_words(gap, signed=True)
    tag = ""
    if not bounds:
        tag = "no interval from one seed" if gap.seeds == 1 else "no interval"
    elif gap.low is not None and gap.high is not None and gap.low <= 0 <= gap.high:
        tag = "no difference shown"
    return Cell(fixed(gap.mean, signed=True), gap.mean, bounds, tag, forest(gap, style, limit))


def forest(gap: Estimate, style: RowStyle, limit: float) -> Markup:
    """The mean as a dot on its interval, zero as a line in the middle."""
    figure = new_figure(FOREST_WIDTH, FOREST_HEIGHT)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-limit, limit)
    axes.set_ylim(-1, 1)
    axes.plot((0, 0), (-1, 1), color=MUTED, linewidth=1)
    if number(gap.low) is not None and number(gap.high) is not None:
        axes.plot((gap.low, gap.high), (0, 0), color=style.colour, linewidth=2.2)  # type: ignore[arg-type]
    axes.plot(gap.mean, 0, "o", color=style.colour, markersize=6.5)
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
