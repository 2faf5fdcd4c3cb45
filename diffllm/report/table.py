"""The numbers of a row: the columns of report.csv, and the page's table with what limits each."""

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup

from diffllm.metrics.metric import Metric
from diffllm.report.comparison import Comparison
from diffllm.report.numbers import MISSING, compact, finite, fixed, percent, short
from diffllm.report.rows import MEASURED, Estimate, Row
from diffllm.report.style import MUTED, RowStyle, new_figure, to_svg

COLUMNS = {
    "variant": "choice of attention=; a column for every other swept key comes after it",
    "parameters": "of the whole decoder",
    "active_parameters": "that one token passes through",
    "flops_per_token": "training FLOPs a token, forward and backward, attention counted causally",
    "tokens": "that a whole run trains on: steps x global_batch_size x seq_len",
    "seeds": "finished runs that the loss is the mean of",
    "seeds_diverged": "finished runs with a held-out loss that is not finite: in no loss or gap",
    "loss": "held-out loss after the last step, nats a token, mean over seeds",
    "loss_low": "lower end of its 95% interval, Student's t over seeds",
    "loss_high": "upper end of its 95% interval",
    "gap": "loss minus the baseline's, mean over the seeds that both have",
    "gap_low": "lower end of its 95% interval, paired Student's t over these seeds",
    "gap_high": "upper end of its 95% interval",
    "gap_seeds": "how many seeds these are",
    "baseline": "label of the row that the gap is measured from; empty where there is no gap",
    "incomparable": "keys that differ between rows and that no loss can be compared across, as "
    "JSON; empty where all rows are comparable",
    **{metric.quantity: metric.column.meaning for metric in MEASURED if metric.column},
}
"""Column to its meaning. All but the swept keys and the sizes are of finished runs; an unknown
number is None, an empty cell."""
FOREST_WIDTH, FOREST_HEIGHT = 132, 18
OUTLYING = 4
"""Times the median reach of a gap and its interval that the scale of all goes to at most."""


def csv_text(comparison: Comparison) -> str:
    """A header and a line a row; numbers in full precision."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(comparison.rows[0].values)
    for row in comparison.rows:
        writer.writerow(map(csv_cell, row.values.values()))
    return file.getvalue()


def csv_cell(value: Any) -> str:
    """Empty for None, JSON for lists and truth values."""
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, (bool, list, dict)) else str(value)


@dataclass(frozen=True)
class Cell:
    """One place of the page's table."""

    text: str
    order: float | str | None = None
    """Sorting goes by it; None comes last."""
    detail: str = ""
    """In small print: the interval, the count behind a share."""
    tag: str = ""
    """A caution about the number: "no difference shown", "1 of 3 seeds diverged"."""
    forest: Markup | None = None


@dataclass(frozen=True)
class TableColumn:
    """A header and the cell of every row."""

    title: str
    unit: str
    hint: str
    cells: list[Cell]


def table_columns(comparison: Comparison, styles: list[RowStyle]) -> list[TableColumn]:
    """All columns that some row has a value for, without the labels of rows."""
    rows = comparison.rows

    def column(title: str, unit: str, names: list[str], cells: Iterable[Cell]) -> TableColumn:
        said = [f"{name}: {COLUMNS[name]}" for name in names]
        return TableColumn(
            title, unit, "; ".join(said) if said[1:] else COLUMNS[names[0]], [*cells]
        )

    def plain(title: str, unit: str, name: str) -> TableColumn:
        cells = (plain_cell(row.values.get(name), compact) for row in rows)
        return column(title, unit, [name], cells)

    gaps = interval_unit([row.gap for row in rows], "95% interval, paired")
    made = [
        column("Held-out loss", loss_unit(comparison), ["loss"], map(loss_cell, rows)),
        column(f"Gap to {comparison.baseline}", gaps, ["gap"], gap_cells(rows, styles)),
        column("Parameters", "", ["parameters", "active_parameters"], map(size_cell, rows)),
        plain("FLOPs", "per token", "flops_per_token"),
        plain("Tokens", "", "tokens"),
        column("Seeds", "", ["seeds"], map(seeds_cell, rows)),
    ]
    for metric in MEASURED:
        if metric.column and metric.column.title:
            second = [metric.column.second] if metric.column.second else []
            cells = (metric_cell(row, metric) for row in rows)
            names = [metric.quantity, *second]
            made.append(column(metric.column.title, metric.column.unit, names, cells))
    return [each for each in made if any(cell != Cell(MISSING) for cell in each.cells)]


def interval_unit(estimates: list[Estimate | None], kind: str) -> str:
    """The unit of losses, with the kind of interval if there is one."""
    sure = any(estimate and in_words(estimate) for estimate in estimates)
    return f"nats a token, {kind}" if sure else "nats a token"


def loss_unit(comparison: Comparison) -> str:
    """The unit of losses, with the keys that forbid sorting by them."""
    keys = ", ".join(difference.key for difference in comparison.differences)
    unit = interval_unit([row.loss for row in comparison.rows], "95% interval")
    return f"{unit}; not comparable across {keys}" if keys else unit


def metric_cell(row: Row, metric: Metric) -> Cell:
    """A metric's number in the form that its column asks for."""
    assert metric.column
    form, value = metric.column.form, row.values.get(metric.quantity)
    second = row.values.get(metric.column.second)
    if form == "share and count":
        steps = f"{short(second)} {'step' if second == 1 else 'steps'}" if finite(second) else ""
        return Cell(percent(value), finite(value), steps)
    if form == "range":
        if finite(value) is None and finite(second) is None:
            return Cell(MISSING)
        return Cell(f"{short(value, 2)} to {short(second, 2)}", finite(second))
    return plain_cell(value, percent if form == "percent" else partial(short, digits=3))


def plain_cell(value: Any, how: Callable[[Any], str]) -> Cell:
    """A number; one that is NaN or infinite is not the same as none."""
    odd = value is not None and finite(value) is None
    return Cell(how(value), finite(value), tag="not finite" if odd else "")


def size_cell(row: Row) -> Cell:
    """Total parameters, active ones below where they differ."""
    total, active = (row.values.get(name) for name in ("parameters", "active_parameters"))
    detail = f"{compact(active)} active" if finite(active) and active != total else ""
    return Cell(compact(total), finite(total), detail)


def seeds_cell(row: Row) -> Cell:
    """How many of all runs the loss is the mean of."""
    seeds, runs = finite(row.values.get("seeds")), len(row.runs)
    text = short(seeds) if seeds == runs else f"{short(seeds or 0)} of {runs}"
    return Cell(text, seeds)


def loss_cell(row: Row) -> Cell:
    """A mean with its interval, and how many seeds are not in it."""
    tag = diverged(row)
    if row.loss is None or finite(row.loss.mean) is None:
        return Cell(MISSING, tag=tag or ("not finite" if row.loss else ""))
    return Cell(fixed(row.loss.mean), row.loss.mean, in_words(row.loss), tag)


def diverged(row: Row, of: str = "") -> str:
    """ "1 of 3 seeds diverged"; nothing if none did."""
    return f"{row.diverged} of {len(row.finished)} seeds{of} diverged" if row.diverged else ""


def in_words(estimate: Estimate, signed: bool = False) -> str:
    """Its 95% interval in words; nothing from a single seed."""
    if finite(estimate.low) is None or finite(estimate.high) is None:
        return ""
    low, high = (fixed(x, signed=signed) for x in (estimate.low, estimate.high))
    return f"{low} to {high}"


def gap_cells(rows: list[Row], styles: list[RowStyle]) -> list[Cell]:
    """Gaps on one scale, zero included, so that they can be compared by eye; none without a gap."""
    limit = forest_limit([row.gap for row in rows if row.gap and finite(row.gap.mean) is not None])
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
    without outliers among them; gaps that go on beyond end in an arrow. None without gaps.
    """
    most = max((gap.seeds for gap in gaps), default=0)
    reaches = [max(map(abs, gap_ends(gap))) for gap in gaps if gap.seeds == most]
    if not reaches:
        return None
    return 1.1 * min(max(reaches), OUTLYING * statistics.median(reaches)) or 1.0


def gap_ends(gap: Estimate) -> list[float]:
    """A gap's mean, and the ends of its interval if it has one."""
    return [x for x in map(finite, (gap.mean, gap.low, gap.high)) if x is not None]


def gap_cell(row: Row, is_baseline: bool, style: RowStyle, limit: float) -> Cell:
    """A gap, its interval, the same as a figure, and whether it shows a difference.

    Args:
        is_baseline: whether the gap of another row is measured from this one.
    """
    gap = row.gap
    if gap is None or finite(gap.mean) is None:
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
    mean, *interval = gap_ends(gap)
    shown = [max(-limit, min(x, limit)) for x in interval]
    axes.plot(shown, [0.0] * len(shown), color=style.colour, linewidth=2.2)
    if abs(mean) <= limit:
        axes.plot(mean, 0, "o", color=style.colour, markersize=6.5)
    for side, arrow in ((-1, "<"), (1, ">")):
        if any(side * x > limit for x in (mean, *interval)):
            axes.plot(side * 0.95 * limit, 0, arrow, color=style.colour, markersize=7)
    label = f"{fixed(mean, signed=True)}, {in_words(gap, True) or 'no interval'}"
    return Markup(to_svg(figure, f"gap{style.index}", [style], label))
