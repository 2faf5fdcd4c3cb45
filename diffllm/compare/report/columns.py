"""The columns of a report: each with its value in report.csv, its meaning, and its cell."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from diffllm.compare.report.curves import BUDGETS
from diffllm.compare.report.notes import divergence, gap_tag
from diffllm.compare.report.numbers import (
    MISSING,
    clock,
    compact,
    finite,
    fixed,
    in_words,
    percent,
    share_words,
    short,
)
from diffllm.compare.report.rows import Row, row_value
from diffllm.core.printing import Cell, Column, Table
from diffllm.metrics.table import METRICS


class ReportColumn(NamedTuple):
    """A column of report.csv, which the page may show too."""

    meaning: str
    value: Callable[[Row], Any]
    """None, an empty cell, where a number is unknown."""
    title: str = ""
    """Its head on the page, where `{}` stands for the baseline; empty if it has no place there."""
    unit: str = ""
    cell: Callable[[Row], Cell] | None = None


def at(path: str) -> Callable[[Row], Any]:
    """Read an attribute of an attribute ("loss.mean"), an entry of a dict or of a tuple by its
    place; None if one of them is missing or empty."""

    def read(row: Row) -> Any:
        found: Any = row
        for name in path.split("."):
            if found is None:
                return None
            if isinstance(found, dict):
                found = found.get(name)
            else:
                found = found[int(name)] if name.isdecimal() else getattr(found, name)
        return None if found in ("", []) else found

    return read


def number_cell(how: Callable[[Any], str], name: str) -> Callable[[Row], Cell]:
    """Make the function that shows a value of a row; NaN and infinity are not the same as none.

    Args:
        how: writes the value.
    """

    def cell(row: Row) -> Cell:
        value = row.values.get(name)
        odd = value is not None and finite(value) is None
        return Cell(how(value), finite(value), tag="not finite" if odd else "")

    return cell


def active_cell(row: Row) -> Cell:
    """The active parameters of a row, if they are not all."""
    active = row.values["active_parameters"]
    return Cell(MISSING if active == row.values["parameters"] else compact(active), finite(active))


def loss_cell(row: Row) -> Cell:
    """A mean with its interval, and how many seeds are not in it."""
    tag = divergence(row, share=False)
    if row.loss is None or finite(row.loss.mean) is None:
        return Cell(MISSING, tag=tag or ("not finite" if row.loss else ""))
    bits = finite(row.values.get("bits_per_byte"))
    small = (in_words(row.loss), "" if bits is None else f"{fixed(bits, 3)} bits a byte")
    return Cell(fixed(row.loss.mean), row.loss.mean, tuple(filter(None, small)), tag)


def lost_seeds(row: Row) -> list[str]:
    """Say which seeds of a row and of its baseline diverged."""
    base = row.baseline
    of_base = divergence(base, f" of {base.label}", share=False) if base else ""
    return [text for text in (divergence(row, share=False), of_base) if text]


def gap_cell(row: Row) -> Cell:
    """A gap, its interval, and whether it shows a difference."""
    if row.gap is None:
        return Cell("", tag="baseline") if row.is_baseline else Cell(MISSING)
    bounds, mean = in_words(row.gap, signed=True), row.gap.mean
    tag = (lost_seeds(row) or [gap_tag(row)])[0]
    return Cell(fixed(mean, signed=True), mean, (bounds,) if bounds else (), tag)


def equal_cell(row: Row, budget: str) -> Cell:
    """A gap at equal cost, its interval, how far reading may be off, and the amount."""
    if (found := row.equal.get(budget)) is None:
        return Cell(MISSING)
    off = "±" + (f"{fixed(found.error)} by reading" if math.isfinite(found.error) else " unknown")
    parts = [in_words(found.gap, signed=True), off if found.error else ""]
    small = filter(None, ["; ".join(filter(None, parts)), *lost_seeds(row)])
    tag = f"at {clock(found.at) if budget == 'seconds' else compact(found.at, 3)}"
    return Cell(fixed(found.gap.mean, signed=True), found.gap.mean, tuple(small), tag)


def seeds_cell(row: Row) -> Cell:
    seeds, runs = row.values["seeds"], len(row.runs)
    tag = f"{row.diverged} diverged: {share_words(row.diverged_share)}" if row.diverged else ""
    return Cell(f"{seeds}" if seeds == runs else f"{seeds} of {runs}", seeds, tag=tag)


def events_cell(row: Row, series: str) -> Cell:
    """Spike events per thousand judged steps, with their interval."""
    if not (rate := row.events(series)):
        return Cell(MISSING)
    # the upper end is never 0: no column of events is omitted because all are
    interval = f"{short(rate.low, 2)} to {short(rate.high, 2)}"
    return Cell(short(rate.value, 2), rate.high, (interval,))


COLUMNS = {
    "variant": ReportColumn(
        "choice of attention=; a column for every other swept key comes after it",
        at("keys.attention"),
    ),
    "parameters": ReportColumn(
        "of the whole decoder", lambda row: row.fact("parameters"), "Parameters",
        cell=number_cell(compact, "parameters"),
    ),
    "active_parameters": ReportColumn(
        "that one token passes through", lambda row: row.fact("active_parameters"),
        "Active parameters", cell=active_cell,
    ),
    "flops_per_token": ReportColumn(
        "training FLOPs a token, forward and backward, attention counted causally",
        lambda row: row.fact("flops_per_token"), "FLOPs", "per token",
        number_cell(compact, "flops_per_token"),
    ),
    "tokens": ReportColumn(
        "that a whole run trains on: steps x global_batch_size x seq_len",
        at("runs.0.planned_tokens"), "Tokens", cell=number_cell(compact, "tokens"),
    ),
    "seeds": ReportColumn(
        "finished runs that the loss is the mean of", at("seeds"), "Seeds", cell=seeds_cell
    ),
    "seeds_diverged": ReportColumn(
        "runs that ended without a finite held-out loss, at their last step or because too many "
        "updates in a row were skipped: in no loss or gap", at("diverged"),
    ),
    "seeds_ended": ReportColumn(
        "runs that ended, finished or diverged", lambda row: len(row.ended)
    ),
    "loss": ReportColumn(
        "held-out loss after the last step, nats a token, mean over seeds", at("loss.mean"),
        "Held-out loss", "nats a token, 95% interval", loss_cell,
    ),
    "loss_low": ReportColumn(
        "lower end of its 95% interval, Student's t over seeds", at("loss.low")
    ),
    "loss_high": ReportColumn("upper end of its 95% interval", at("loss.high")),
    "gap": ReportColumn(
        "loss minus the baseline's, mean over the seeds that both have", at("gap.mean"),
        "Gap to {}", "nats a token, 95% interval, paired", gap_cell,
    ),
    "gap_low": ReportColumn(
        "lower end of its 95% interval, paired Student's t over these seeds", at("gap.low")
    ),
    "gap_high": ReportColumn("upper end of its 95% interval", at("gap.high")),
    "gap_seeds": ReportColumn("how many seeds these are", at("gap.seeds")),
    "gap_p": ReportColumn(
        "two-sided p of the paired t test; 1 where seeds do not vary", at("outcome.paired.p")
    ),
    "gap_p_holm": ReportColumn(
        "that p after Holm's correction over all gaps of the report; a gap in favour of the side "
        "that diverged more enters with 1", at("p_holm"),
    ),
    "gap_welch_low": ReportColumn(
        "lower end of the gap's 95% interval by Welch's t test, unpaired, over all finite seeds of "
        "both", at("outcome.welch.low"),
    ),
    "gap_welch_high": ReportColumn("upper end of it", at("outcome.welch.high")),
    "gap_documents_low": ReportColumn(
        "lower end of the gap's 95% interval over held-out documents and seeds together, a "
        "bootstrap; from 8 seeds on", at("documents.low"),
    ),
    "gap_documents_high": ReportColumn("upper end of it", at("documents.high")),
    "seed_correlation": ReportColumn(
        "correlation of the losses with the baseline's over common seeds; from three on",
        at("outcome.correlation"),
    ),
    "diverged_low": ReportColumn(
        "lower end of the 95% interval of the share of runs that diverge, Clopper and Pearson's",
        lambda row: row.diverged_share.interval[0] if row.ended else None,
    ),
    "diverged_high": ReportColumn(
        "upper end of it", lambda row: row.diverged_share.interval[1] if row.ended else None
    ),
    "diverged_p": ReportColumn(
        "p of Fisher's exact test that as many diverge as of the baseline",
        at("outcome.p_diverged"),
    ),
    **{
        f"gap_at_{name}{end}": ReportColumn(meaning.format(budget.unit), at(f"equal.{name}.{path}"))
        for name, budget in BUDGETS.items()
        for end, path, meaning in (
            ("", "gap.mean", "held-out loss minus the baseline's where both had spent equal {}, "
             "read off evaluations during training, mean over the seeds that both have"),
            ("_low", "gap.low", "lower end of its 95% interval, paired Student's t over these "
             "seeds"),
            ("_high", "gap.high", "upper end of its 95% interval"),
            ("_error", "error", "nats a token that it may be off by, for evaluations lie apart"),
            ("_of", "at", "the {} that both had spent"),
        )
    },
    "baseline": ReportColumn(
        "label of the row that the gap is measured from; empty where there is no gap",
        at("baseline.label"),
    ),
    "incomparable": ReportColumn(
        "keys that differ between rows and that no loss can be compared across, as JSON; empty "
        "where all rows are comparable", at("incomparable"),
    ),
    "group": ReportColumn(
        "letter of the rows that it can be compared with; empty where all rows can be", at("group")
    ),
    **{
        f"{series}_events{end}": ReportColumn(
            meaning.format(what), lambda row, series=series, path=path:  # type: ignore[misc]
            getattr(row.events(series), path, None), title.format(name), "events per 1,000 steps",
            partial(events_cell, series=series),
        )
        for series, what, name in (
            ("loss", "loss", "Loss"), ("grad", "log gradient norm", "Gradient"),
        )
        for end, path, title, meaning in (
            ("", "count", "", "spike events of the {} without its trend, all ended seeds together"),
            ("_judged", "steps", "", "steps of these seeds at which the {} could be judged"),
            ("_per_1000", "value", "{} spikes", "these events a thousand of these steps"),
            ("_low", "low", "", "lower end of its exact 95% interval (Garwood)"),
            ("_high", "high", "", "upper end of it"),
        )
    },
    "seconds": ReportColumn(
        "of wall clock that a finished run took, all its starts together; mean over seeds",
        lambda row: row.mean("seconds"), "Time", "a run", number_cell(clock, "seconds"),
    ),
    "bits_per_byte": ReportColumn(
        "held-out loss after the last step, bits a byte of text, mean over seeds",
        lambda row: row.mean("heldout_bits_per_byte"),
    ),
    **{
        metric.quantity: ReportColumn(
            metric.column_meaning, partial(row_value, metric=metric), metric.column.title,
            metric.column.unit,
            number_cell(percent if metric.column.percent else short, metric.quantity),
        )
        for metric in METRICS if metric.column
    },
}  # fmt: skip
"""Columns by their names in report.csv, in order. All but the swept keys and the sizes are of
finished runs."""
FIRST_SHOWN = ("loss", "gap")
"""Columns that the page has before the others."""
CONSTANT = ("Parameters", "FLOPs", "Tokens", "Seeds")
"""Columns of the page that need no place where all rows agree."""


def row_values(row: Row) -> dict[str, Any]:
    """The columns of a row in report.csv, the swept keys after the variant."""
    swept = {key: value for key, value in row.keys.items() if key != "attention"}
    values = {name: column.value(row) for name, column in COLUMNS.items()}
    return {"variant": values.pop("variant"), **swept, **values}


def csv_text(rows: list[Row]) -> str:
    cells = [[Cell(value=value) for value in row.values.values()] for row in rows]
    return Table.of(list(rows[0].values), cells).csv()


def table_columns(rows: list[Row], baseline: str | None) -> list[Column]:
    """The columns of the page that some row has a value for, without the labels of rows."""
    made = []
    for name in sorted(COLUMNS, key=lambda name: name not in FIRST_SHOWN):
        column = COLUMNS[name]
        if not column.title or not column.cell:
            continue
        cells, meaning = [column.cell(row) for row in rows], f"{name}: {column.meaning}"
        if any(cell.text != MISSING or cell.tag for cell in cells):
            made.append(Column(column.title.format(baseline), cells, column.unit, meaning))
    return made


def cost_columns(rows: list[Row]) -> list[Column]:
    """The gaps at equal cost, a column a cost that some row has one for."""
    return [
        Column(f"At equal {budget.unit}", [equal_cell(row, name) for row in rows], "nats a token",
               f"{budget.meaning}; {COLUMNS[f'gap_at_{name}'].meaning}")
        for name, budget in BUDGETS.items() if any(name in row.equal for row in rows)
    ]  # fmt: skip


def fold_constant(columns: list[Column]) -> tuple[list[Column], list[str]]:
    """The columns that tell rows apart, and a sentence about those that are all zero and those
    that are the same in all of several rows."""
    zero = [each for each in columns if all(cell.value == 0 for cell in each.cells)]
    same = [
        each
        for each in columns
        if each not in zero and each.title in CONSTANT and len({*each.cells}) == 1
        if len(each.cells) > 1 and not each.cells[0].tag
    ]
    said = []
    if zero:
        said.append(f"All zero: {', '.join(each.title for each in zero)}.")
    if same:
        parts = (filter(None, (each.title, each.unit, each.cells[0].text)) for each in same)
        said.append(f"The same in all rows: {', '.join(map(' '.join, parts))}.")
    return [each for each in columns if each not in zero and each not in same], said
