"""The numbers of a row: the columns of report.csv, and the page's table with what limits each."""

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from diffllm.compare.report.budgets import BUDGETS
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.gap_statistics import family, survives
from diffllm.compare.report.numbers import (
    MISSING,
    clock,
    compact,
    finite,
    fixed,
    in_words,
    percent,
    rate_words,
    share_words,
    short,
)
from diffllm.compare.report.rows import Row, column_metrics
from diffllm.metrics.metric import Metric
from diffllm.metrics.table import DEFINITIONS, metric_of
from diffllm.statistics.estimates import Estimate

EQUAL = {
    "": "held-out loss minus the baseline's where both had spent equal {}, read off evaluations "
    "during training, mean over the seeds that both have",
    "_low": "lower end of its 95% interval, paired Student's t over these seeds",
    "_high": "upper end of its 95% interval",
    "_error": "nats a token that it may be off by, for evaluations lie apart",
    "_of": "the {} that both had spent",
}
"""Endings of the columns of a gap at equal cost, and what they mean of a cost."""
COLUMNS = {
    "variant": "choice of attention=; a column for every other swept key comes after it",
    "parameters": "of the whole decoder",
    "active_parameters": "that one token passes through",
    "flops_per_token": "training FLOPs a token, forward and backward, attention counted causally",
    "tokens": "that a whole run trains on: steps x global_batch_size x seq_len",
    "seeds": "finished runs that the loss is the mean of",
    "seeds_diverged": "runs that ended without a finite held-out loss, at their last step or "
    "because too many updates in a row were skipped: in no loss or gap",
    "seeds_ended": "runs that ended, finished or diverged",
    "loss": "held-out loss after the last step, nats a token, mean over seeds",
    "loss_low": "lower end of its 95% interval, Student's t over seeds",
    "loss_high": "upper end of its 95% interval",
    "gap": "loss minus the baseline's, mean over the seeds that both have",
    "gap_low": "lower end of its 95% interval, paired Student's t over these seeds",
    "gap_high": "upper end of its 95% interval",
    "gap_seeds": "how many seeds these are",
    "gap_p": "two-sided p of the paired t test; 1 where seeds do not vary",
    "gap_p_holm": "that p after Holm's correction over all gaps of the report; a gap in favour of "
    "the side that diverged more enters with 1",
    "gap_welch_low": "lower end of the gap's 95% interval by Welch's t test, unpaired, over all "
    "finite seeds of both",
    "gap_welch_high": "upper end of it",
    "gap_documents_low": "lower end of the gap's 95% interval over held-out documents and seeds "
    "together, a bootstrap; from 8 seeds on",
    "gap_documents_high": "upper end of it",
    "seed_correlation": "correlation of the losses with the baseline's over common seeds; from "
    "three on",
    "diverged_low": "lower end of the 95% interval of the share of runs that diverge, Clopper and "
    "Pearson's",
    "diverged_high": "upper end of it",
    "diverged_p": "p of Fisher's exact test that as many diverge as of the baseline",
    **{
        f"gap_at_{budget}{suffix}": words.format(what)
        for budget, what in (("tokens", "tokens"), ("flops", "FLOPs"), ("seconds", "seconds"))
        for suffix, words in EQUAL.items()
    },
    "baseline": "label of the row that the gap is measured from; empty where there is no gap",
    "incomparable": "keys that differ between rows and that no loss can be compared across, as "
    "JSON; empty where all rows are comparable",
    "group": "letter of the rows that it can be compared with; empty where all rows can be",
    **{
        f"{name}_events{end}": meaning
        for name, what in (("loss", "loss"), ("grad", "log gradient norm"))
        for end, meaning in (
            ("", f"spike events of the {what} without its trend, all ended seeds together"),
            ("_judged", f"steps of these seeds at which the {what} could be judged"),
            ("_per_1000", "these events a thousand of these steps"),
            ("_low", "lower end of its exact 95% interval (Garwood)"),
            ("_high", "upper end of it"),
        )
    },
    "seconds": "of wall clock that a finished run took, all its starts together; mean over seeds",
    "bits_per_byte": "held-out loss after the last step, bits a byte of text, mean over seeds",
    **{metric.quantity: metric.column_meaning for metric in column_metrics()},
}
"""Column to its meaning. All but the swept keys and the sizes are of finished runs; an unknown
number is None, an empty cell."""

CONSTANT = ("Parameters", "FLOPs", "Tokens", "Seeds")
"""Columns of the page that need no place where all rows agree."""


def meaning(column: str) -> str:
    """Return the meaning of a column, a metric of a plugin's among them."""
    return COLUMNS[column] if column in COLUMNS else metric_of(column).column_meaning


def csv_text(comparison: Comparison) -> str:
    """A header and a line a row; numbers in full precision."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(comparison.rows[0].values)
    for row in comparison.rows:
        writer.writerow(map(csv_cell, row.values.values()))
    return file.getvalue()


def csv_cell(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, (bool, list, dict)) else str(value)


@dataclass(frozen=True)
class Cell:
    """One place of the page's table."""

    text: str
    order: float | None = None
    """Sorting goes by it; None comes last."""
    detail: str = ""
    """In small print: the interval, the other end of a range."""
    tag: str = ""
    """A caution about the number: "no difference shown", "1 of 3 seeds diverged"."""
    second: float = 0.0
    """The number in the small print, if it is one of a metric of its own."""
    more: tuple[str, ...] = ()
    """Further lines in small print."""


@dataclass(frozen=True)
class TableColumn:
    """A header and the cell of every row."""

    title: str
    unit: str
    hint: str
    cells: list[Cell]


def table_columns(comparison: Comparison) -> list[TableColumn]:
    """All columns that some row has a value for, without the labels of rows."""
    rows = comparison.rows
    made = []

    def column(title: str, unit: str, names: list[str], cell: Callable[[Row], Cell]) -> None:
        hints = [f"{name}: {meaning(name)}" for name in names if name]
        hint = "; ".join(hints) if len(hints) > 1 else meaning(names[0])
        made.append(TableColumn(title, unit, hint, [cell(row) for row in rows]))

    unit = interval_unit([row.loss for row in rows], "95% interval")
    column("Held-out loss", unit, ["loss"], loss_cell)
    unit = interval_unit([row.gap for row in rows], "95% interval, paired")
    bases, several = [row.baseline for row in rows], len(family(rows)) > 1
    column(
        f"Gap to {comparison.baseline}", unit, ["gap"], lambda row: gap_cell(row, bases, several)
    )
    column("Parameters", "", ["parameters", "active_parameters"], size_cell)
    flops = "flops_per_token"
    column("FLOPs", "per token", [flops], lambda row: number_cell(row.values[flops], compact))
    column("Tokens", "", ["tokens"], lambda row: number_cell(row.values["tokens"], compact))
    column("Seeds", "", ["seeds"], seeds_cell)
    column("Time", "a run", ["seconds"], lambda row: number_cell(row.values["seconds"], clock))
    for metric in column_metrics():
        if not ((shown := metric.column) and shown.title):
            continue
        names, unit, cell = [metric.quantity, shown.second], shown.unit, metric_cell
        if (series := series_of(metric)) and any(row.events(series) for row in rows):
            names = [f"{series}_events_per_1000", *names]
            unit, cell = "events per 1,000 steps", spikes_cell
        column(shown.title, unit, names, partial(cell, metric=metric))
    return [each for each in made if any(cell != Cell(MISSING) for cell in each.cells)]


def fold_constant(columns: list[TableColumn]) -> tuple[list[TableColumn], list[str]]:
    """The columns that tell rows apart, and a sentence about those that are all zero and those
    that are the same in all of several rows."""
    zero = [each for each in columns if all(c.order == c.second == 0 for c in each.cells)]
    same = [
        each
        for each in columns
        if each not in zero and each.title in CONSTANT and len({*each.cells}) == 1
        if len(each.cells) > 1 and not each.cells[0].tag
    ]
    said = []
    if zero:
        titles = [f"{each.title[0].lower()}{each.title[1:]}" for each in zero]
        said.append(f"All zero: {', '.join(titles)}.")
    if same:
        parts = [f"{each.title} {each.unit}".strip() for each in same]
        values = [f"{part} {each.cells[0].text}" for part, each in zip(parts, same, strict=True)]
        said.append(f"The same in all rows: {', '.join(values)}.")
    return [each for each in columns if each not in zero and each not in same], said


def cost_columns(comparison: Comparison) -> list[TableColumn]:
    """The gaps at equal cost, a column a cost that some row has one for."""
    made = []
    for name, budget in BUDGETS.items():
        cells = [equal_cell(row, name) for row in comparison.rows]
        if any(name in row.equal for row in comparison.rows):
            hint = f"{budget.meaning}; {meaning(f'gap_at_{name}')}"
            made.append(TableColumn(f"At equal {budget.unit}", "nats a token", hint, cells))
    return made


def equal_cell(row: Row, budget: str) -> Cell:
    """A gap at equal cost, its interval, how far reading may be off, and the amount."""
    if (found := row.equal.get(budget)) is None:
        return Cell(MISSING)
    off = "±" + (f"{fixed(found.error)} by reading" if math.isfinite(found.error) else " unknown")
    parts = [in_words(found.gap, signed=True), off if found.error else ""]
    tag = f"at {clock(found.at) if budget == 'seconds' else compact(found.at, 3)}"
    mean, base = found.gap.mean, row.baseline
    lost = (diverged(row), diverged(base, f" of {base.label}") if base else "")
    detail = "; ".join(filter(None, parts))
    return Cell(fixed(mean, signed=True), mean, detail, tag, more=tuple(filter(None, lost)))


def interval_unit(estimates: list[Estimate | None], kind: str) -> str:
    """The unit of losses, with the kind of interval if there is one."""
    sure = any(estimate and in_words(estimate) for estimate in estimates)
    return f"nats a token, {kind}" if sure else "nats a token"


def metric_cell(row: Row, metric: Metric) -> Cell:
    """A metric's number, that of a second metric in small print."""
    assert metric.column
    how = percent if metric.column.percent else short
    second = row.values.get(metric.column.second)
    column = metric_of(metric.column.second).column if finite(second) is not None else None
    detail = f"{column.unit} {(percent if column.percent else short)(second)}" if column else ""
    cell = number_cell(row.values.get(metric.quantity), how, detail)
    return replace(cell, second=finite(second) or 0.0)


def number_cell(value: Any, how: Callable[[Any], str], detail: str = "") -> Cell:
    """A number; one that is NaN or infinite is not the same as none."""
    odd = value is not None and finite(value) is None
    return Cell(how(value), finite(value), detail, "not finite" if odd else "")


def size_cell(row: Row) -> Cell:
    """Total parameters, active ones below where they differ."""
    total, active = (row.values.get(name) for name in ("parameters", "active_parameters"))
    detail = f"{compact(active)} active" if finite(active) and active != total else ""
    return Cell(compact(total), finite(total), detail)


def seeds_cell(row: Row) -> Cell:
    """How many of all runs the loss is the mean of."""
    seeds, runs, share = row.values["seeds"], len(row.runs), row.diverged_share
    tag = f"{row.diverged} diverged: {share_words(share)}" if row.diverged else ""
    return Cell(f"{seeds}" if seeds == runs else f"{seeds} of {runs}", seeds, tag=tag)


def series_of(metric: Metric) -> str:
    """The series that a score of spikes is of: "loss" or "grad"; empty for other metrics."""
    definition, _, rest = metric.name.partition("/")
    return (
        rest.removesuffix("_score") if definition in DEFINITIONS and rest.endswith("_score") else ""
    )


def spikes_cell(row: Row, metric: Metric) -> Cell:
    """Spike events a thousand judged steps, with their interval; below, the published scores."""
    assert metric.column
    scores = []
    for name in (metric.name, metric.column.second):
        if finite(value := row.values.get(name)) is not None:
            definition = DEFINITIONS[name.partition("/")[0]][1].removesuffix(" steps")
            scores.append(f"{definition}: {percent(value)}")
    rate = row.events(series_of(metric))
    if not rate:
        return Cell(MISSING, more=tuple(scores))
    # the upper end is never 0: no column of events is left out because all are
    return Cell(short(rate.value, 2), rate.value, rate_words(rate), "", rate.high, tuple(scores))


def loss_cell(row: Row) -> Cell:
    """A mean with its interval, and how many seeds are not in it."""
    tag = diverged(row)
    if row.loss is None or finite(row.loss.mean) is None:
        return Cell(MISSING, tag=tag or ("not finite" if row.loss else ""))
    bits = finite(row.values.get("bits_per_byte"))
    more = () if bits is None else (f"{fixed(bits, 3)} bits a byte",)
    return Cell(fixed(row.loss.mean), row.loss.mean, in_words(row.loss), tag, more=more)


def diverged(row: Row, of: str = "") -> str:
    """ "1 of 3 seeds diverged"; nothing if none did."""
    return f"{row.diverged} of {len(row.ended)} seeds{of} diverged" if row.diverged else ""


def gap_cell(row: Row, baselines: list[Row | None], several: bool) -> Cell:
    """A gap, its interval, and whether it shows a difference.

    Args:
        baselines: the rows that the gaps of others are measured from.
        several: whether Holm's correction is over several gaps.
    """
    gap = row.gap
    if gap is None:
        is_baseline = any(row is base for base in baselines)
        return Cell("", tag="baseline") if is_baseline else Cell(MISSING)
    bounds = in_words(gap, signed=True)
    tag = diverged(row)
    if not tag and row.baseline is not None:
        tag = diverged(row.baseline, f" of {row.baseline.label}")
    if not tag and not bounds:
        tag = "no interval from one seed"
    if not tag and gap.holds_zero:
        tag = "no difference shown"
    if not tag and row.outcome and row.outcome.paired and row.outcome.paired.zero_variance:
        tag = "seeds do not vary"
    if not tag and several and not survives(row):
        tag = "not after Holm"
    return Cell(fixed(gap.mean, signed=True), gap.mean, bounds, tag)
