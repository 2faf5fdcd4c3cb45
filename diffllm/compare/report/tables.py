"""The columns of report.csv, and of the table of results on the page."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from diffllm.compare.arms.budget import BUDGETS
from diffllm.compare.arms.sentences import (
    MISSING,
    clock,
    compact,
    ends,
    finite,
    fixed,
    in_words,
    percent,
    share_words,
    short,
)
from diffllm.compare.report.results import (
    divergence,
    gap_tag,
    has_intervals,
    lost_seeds,
)
from diffllm.compare.report.rows import Row
from diffllm.core.printing import Cell, Table, TableColumn
from diffllm.metrics.table import METRICS


class PageColumn(NamedTuple):
    title: str
    """Title of the column; `{}` is replaced by the baseline."""
    unit: str
    meaning: str
    cell: Callable[[Row], Cell]


def row_values(row: Row, incomparable: list[str]) -> dict[str, Any]:
    """Map each column name of report.csv to the value of `row`; None means an empty cell.

    Args:
        incomparable: keys that must be equal in two rows to compare the rows.
    """
    loss = row.loss
    values = {"variant": row.variant, **row.keys}
    del values["attention"]
    for fact in ("parameters", "active_parameters", "flops_per_token"):
        values[fact] = row.fact(fact)
    values |= {
        "tokens": row.runs[0].planned_tokens,
        "seeds": row.seeds,
        "seeds_diverged": row.diverged,
        "seeds_ended": len(row.ended),
        "loss": loss and loss.mean,
        **ends("loss", loss),
        **gap_columns(row),
        "baseline": row.baseline and row.baseline.label,
        "incomparable": incomparable or None,
        "group": row.group or None,
    }
    for series in ("loss", "grad"):
        rate = row.events(series)
        for suffix, field in RATE_FIELDS.items():
            values[f"{series}_events{suffix}"] = rate and getattr(rate, field)
    values["seconds"] = row.summary_mean("seconds")
    values["bits_per_byte"] = row.summary_mean("heldout_bits_per_byte")
    for metric in METRICS:
        if metric.column:
            values[metric.quantity] = row.value(metric)
    return values


def gap_columns(row: Row) -> dict[str, Any]:
    """Map the columns of report.csv about the gap of `row` to their values."""
    outcome, gap = row.outcome, row.gap
    paired = outcome and outcome.paired
    slope = row.trend and row.trend.slope
    low, high = row.diverged_share.interval if row.ended else (None, None)
    values = {
        "gap": gap and gap.mean,
        **ends("gap", gap),
        "gap_seeds": gap and gap.seeds,
        "gap_p": paired and paired.p,
        "gap_p_holm": row.p_holm,
        **ends("gap_welch", outcome and outcome.welch),
        **ends("gap_documents", outcome and outcome.over_documents),
        "gap_trend": slope and slope.mean,
        **ends("gap_trend", slope),
        "seed_correlation": outcome and outcome.correlation,
        "diverged_low": low,
        "diverged_high": high,
        "diverged_p": outcome and outcome.p_diverged,
    }
    for name in BUDGETS:
        equal = row.equal.get(name)
        values[f"gap_at_{name}"] = equal and equal.gap.mean
        values |= ends(f"gap_at_{name}", equal and equal.gap)
        values[f"gap_at_{name}_of"] = equal and equal.at
    return values


def csv_text(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        cells = [Cell(value=value) for value in row.values.values()]
        lines.append(cells)
    return Table.of(list(rows[0].values), lines).csv()


def number_cell(text_of: Callable[[Any], str], name: str) -> Callable[[Row], Cell]:
    """Return a function that makes the cell of a column of report.csv that contains numbers."""

    def cell(row: Row) -> Cell:
        value = row.values.get(name)
        number = finite(value)
        is_odd = value is not None and number is None
        return Cell(text_of(value), number, tag="not finite" if is_odd else "")

    return cell


def active_cell(row: Row) -> Cell:
    active = row.values["active_parameters"]
    # Without experts, both numbers are equal, and a column of dashes is omitted.
    is_dense = active == row.values["parameters"]
    return Cell(MISSING if is_dense else compact(active), finite(active))


def loss_cell(row: Row) -> Cell:
    tag = divergence(row, share=False)
    if row.loss is None:
        return Cell(MISSING, tag=tag)
    small = []
    interval = in_words(row.loss)
    if interval:
        small.append(interval)
    bits = finite(row.values.get("bits_per_byte"))
    if bits is not None:
        small.append(f"{fixed(bits, 3)} bits per byte")
    return Cell(fixed(row.loss.mean), row.loss.mean, tuple(small), tag)


def gap_cell(row: Row) -> Cell:
    if row.gap is None:
        return Cell("", tag="baseline") if row.is_baseline else Cell(MISSING)
    interval = in_words(row.gap, signed=True)
    tags = [*lost_seeds(row), gap_tag(row)]
    return Cell(
        fixed(row.gap.mean, signed=True),
        row.gap.mean,
        small=(interval,) if interval else (),
        tag=tags[0],
    )


def seeds_cell(row: Row) -> Cell:
    tag = ""
    if row.diverged:
        tag = f"{row.diverged} diverged: {share_words(row.diverged_share)}"
    return Cell(row.seeds_text, row.seeds, tag=tag)


def events_cell(series: str, row: Row) -> Cell:
    rate = row.events(series)
    if not rate:
        return Cell(MISSING)
    interval = f"{short(rate.low, 2)} to {short(rate.high, 2)}"
    # The value is the upper limit: if all rates are 0, `fold_constant` states the largest interval.
    return Cell(short(rate.value, 2), rate.high, (interval,))


def events_column(title: str, series: str, description: str) -> PageColumn:
    meaning = (
        f"spike events of the {description} without its trend, per 1,000 judged steps of all "
        "ended seeds"
    )
    return PageColumn(title, "events per 1,000 steps", meaning, partial(events_cell, series))


def metric_columns() -> dict[str, PageColumn]:
    columns = {}
    for metric in METRICS:
        column = metric.column
        if column and column.title:
            cell = number_cell(percent if column.percent else short, metric.quantity)
            columns[metric.quantity] = PageColumn(
                column.title, column.unit, metric.column_meaning, cell
            )
    return columns


PAGE = {
    "loss": PageColumn(
        "Held-out loss",
        "nats per token",
        "held-out loss after the last step, nats per token, mean over seeds",
        loss_cell,
    ),
    "gap": PageColumn(
        "Gap to {}",
        "nats per token, paired",
        "loss minus the baseline's, mean over the common seeds",
        gap_cell,
    ),
    "parameters": PageColumn(
        "Parameters", "", "number in the whole decoder", number_cell(compact, "parameters")
    ),
    "active_parameters": PageColumn(
        "Active parameters", "", "number that one token uses", active_cell
    ),
    "flops_per_token": PageColumn(
        "FLOPs",
        "per token",
        "training FLOPs per token, forward and backward; attention counts visible keys only",
        number_cell(compact, "flops_per_token"),
    ),
    "tokens": PageColumn(
        "Tokens", "", "training tokens of a complete run", number_cell(compact, "tokens")
    ),
    "seeds": PageColumn("Seeds", "", "number of finished runs in the mean loss", seeds_cell),
    "loss_events_per_1000": events_column("Loss spikes", "loss", "loss"),
    "grad_events_per_1000": events_column("Gradient spikes", "grad", "log gradient norm"),
    "seconds": PageColumn(
        "Time",
        "per run",
        "wall-clock time of a finished run over all its starts; mean over seeds",
        number_cell(clock, "seconds"),
    ),
    **metric_columns(),
}
"""Columns of the page, by name of the column in report.csv."""
WITH_INTERVAL = ("loss", "gap")
"""Columns with a 95% interval over seeds, if there are several seeds."""
ALWAYS_SHOWN = ("Held-out loss", "Gap to", "Diverged")
"""Beginnings of titles of columns that are shown even if all rows have equal values."""
RATE_FIELDS = {
    "": "count",
    "_judged": "steps",
    "_per_1000": "value",
    "_low": "low",
    "_high": "high",
}


def table_columns(rows: list[Row], baseline: str | None) -> list[TableColumn]:
    """Return the columns of the results table that have a value in at least one row."""
    columns = []
    for name, (title, unit, meaning, cell_of) in PAGE.items():
        cells = [cell_of(row) for row in rows]
        if name in WITH_INTERVAL and has_intervals(rows):
            unit += ", 95% interval"
        if has_content(cells):
            columns.append(TableColumn(title.format(baseline), cells, unit, f"{name}: {meaning}"))
    return columns


def has_content(cells: Iterable[Cell]) -> bool:
    return any(cell.text != MISSING or cell.tag for cell in cells)


def fold_constant(table: Table) -> tuple[Table, list[str]]:
    """Remove columns in which all cells are equal.

    The first column, and columns whose title starts with a string in ALWAYS_SHOWN, are never
    removed. If the table has only one row, only columns with a missing value or 0 are removed.

    Returns the remaining table, and sentences that state the values of the removed columns.
    """
    first, *others = table.columns
    columns = [first]
    removed: dict[str, list[str]] = {}
    for column in others:
        cell = max(column.cells, key=lambda cell: finite(cell.value) or 0.0)
        is_zero = cell.text in ("0", "0%")
        # Intervals of zeros can differ: the sentence states the largest.
        shown = {(other.text, other.tag, is_zero or other.small) for other in column.cells}
        # A tag, such as a number of diverged seeds, must stay in its row.
        is_constant = len(shown) == 1 and not cell.tag
        if not is_constant or column.title.startswith(ALWAYS_SHOWN):
            columns.append(column)
        elif cell.text == MISSING:
            removed.setdefault("Not measured", []).append(column.title)
        elif is_zero:
            unit = f"({', '.join(cell.small)} {column.unit})" if cell.small else column.unit
            removed.setdefault("All zero", []).append(f"{column.title} {unit}".strip())
        elif len(column.cells) > 1:
            parts = [part for part in (column.title, column.unit, cell.line) if part]
            removed.setdefault("Equal as shown in all rows", []).append(" ".join(parts))
        else:
            columns.append(column)
    sentences = []
    for reason, texts in removed.items():
        sentences.append(f"{reason}: {', '.join(texts)}.")
    return Table(columns), sentences
