"""The tables of a report: the columns of report.csv, and what the page shows."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from diffllm.compare.report.budgets import BUDGETS
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.evaluations import Grid, ScoreCell, ScoreLine, reaching
from diffllm.compare.report.gap_statistics import family, survives
from diffllm.compare.report.groups import Group
from diffllm.compare.report.numbers import (
    MISSING,
    clock,
    compact,
    finite,
    fixed,
    in_digits,
    in_words,
    percent,
    rate_words,
    share_words,
    short,
    with_interval,
)
from diffllm.compare.report.rows import Row, column_metrics
from diffllm.compare.report.style import RowStyle
from diffllm.compare.report.text import divergence
from diffllm.core.printing import Cell, Column, Table
from diffllm.metrics.metric import Metric
from diffllm.metrics.table import DEFINITIONS, metric_of
from diffllm.statistics.estimates import Estimate, Times

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
MATRIX = 8
"""Groups up to which each has a column of the table of what differs."""


def meaning(column: str) -> str:
    return COLUMNS[column] if column in COLUMNS else metric_of(column).column_meaning


def csv_text(comparison: Comparison) -> str:
    rows = [[Cell(value=value) for value in row.values.values()] for row in comparison.rows]
    return Table.of(list(comparison.rows[0].values), rows).csv()


def table_columns(comparison: Comparison) -> list[Column]:
    """All columns that some row has a value for, without the labels of rows."""
    rows = comparison.rows
    made = []

    def column(title: str, unit: str, names: list[str], cell: Callable[[Row], Cell]) -> None:
        hints = [f"{name}: {meaning(name)}" for name in names if name]
        hint = "; ".join(hints) if len(hints) > 1 else meaning(names[0])
        made.append(Column(title, [cell(row) for row in rows], unit, hint))

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
        titles = [f"{each.title[0].lower()}{each.title[1:]}" for each in zero]
        said.append(f"All zero: {', '.join(titles)}.")
    if same:
        parts = [f"{each.title} {each.unit}".strip() for each in same]
        values = [f"{part} {each.cells[0].text}" for part, each in zip(parts, same, strict=True)]
        said.append(f"The same in all rows: {', '.join(values)}.")
    return [each for each in columns if each not in zero and each not in same], said


def cost_columns(comparison: Comparison) -> list[Column]:
    """The gaps at equal cost, a column a cost that some row has one for."""
    made = []
    for name, budget in BUDGETS.items():
        cells = [equal_cell(row, name) for row in comparison.rows]
        if any(name in row.equal for row in comparison.rows):
            hint = f"{budget.meaning}; {meaning(f'gap_at_{name}')}"
            made.append(Column(f"At equal {budget.unit}", cells, "nats a token", hint))
    return made


def equal_cell(row: Row, budget: str) -> Cell:
    """A gap at equal cost, its interval, how far reading may be off, and the amount."""
    if (found := row.equal.get(budget)) is None:
        return Cell(MISSING)
    off = "±" + (f"{fixed(found.error)} by reading" if math.isfinite(found.error) else " unknown")
    parts = [in_words(found.gap, signed=True), off if found.error else ""]
    tag = f"at {clock(found.at) if budget == 'seconds' else compact(found.at, 3)}"
    mean, base = found.gap.mean, row.baseline
    lost = [divergence(row, share=False)]
    lost += [divergence(base, f" of {base.label}", share=False)] if base else []
    small = ["; ".join(filter(None, parts)), *lost]
    return Cell(fixed(mean, signed=True), mean, tuple(filter(None, small)), tag)


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
    # 0 says that a column can be left out: then the number in small print has to be 0 too
    return replace(cell, value=finite(second)) if cell.value == 0 and second else cell


def number_cell(value: Any, how: Callable[[Any], str], detail: str = "") -> Cell:
    """A number; one that is NaN or infinite is not the same as none."""
    odd = value is not None and finite(value) is None
    small = (detail,) if detail else ()
    return Cell(how(value), finite(value), small, "not finite" if odd else "")


def size_cell(row: Row) -> Cell:
    total, active = (row.values.get(name) for name in ("parameters", "active_parameters"))
    detail = f"{compact(active)} active" if finite(active) and active != total else ""
    return Cell(compact(total), finite(total), (detail,) if detail else ())


def seeds_cell(row: Row) -> Cell:
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
        return Cell(MISSING, small=tuple(scores))
    # the upper end is never 0: no column of events is left out because all are
    return Cell(short(rate.value, 2), rate.high, (rate_words(rate), *scores))


def loss_cell(row: Row) -> Cell:
    """A mean with its interval, and how many seeds are not in it."""
    tag = divergence(row, share=False)
    if row.loss is None or finite(row.loss.mean) is None:
        return Cell(MISSING, tag=tag or ("not finite" if row.loss else ""))
    bits = finite(row.values.get("bits_per_byte"))
    small = (in_words(row.loss), "" if bits is None else f"{fixed(bits, 3)} bits a byte")
    return Cell(fixed(row.loss.mean), row.loss.mean, tuple(filter(None, small)), tag)


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
    tag = divergence(row, share=False)
    if not tag and row.baseline is not None:
        tag = divergence(row.baseline, f" of {row.baseline.label}", share=False)
    if not tag and not bounds:
        tag = "no interval from one seed"
    if not tag and gap.holds_zero:
        tag = "no difference shown"
    if not tag and row.outcome and row.outcome.paired and row.outcome.paired.zero_variance:
        tag = "seeds do not vary"
    if not tag and several and not survives(row):
        tag = "not after Holm"
    return Cell(fixed(gap.mean, signed=True), gap.mean, (bounds,) if bounds else (), tag)


def named(rows: list[Row], styles: list[RowStyle]) -> list[Cell]:
    return [Cell(row.label, icon=style.swatch) for row, style in zip(rows, styles, strict=True)]


def cost_table(comparison: Comparison) -> Table:
    """The gaps at equal cost, of the rows that have one."""
    kept = [i for i, row in enumerate(comparison.rows) if row.equal]
    labels = Column(f"Gap to {comparison.baseline}", [Cell(row.label) for row in comparison.rows])
    columns = [labels, *cost_columns(comparison)]
    return Table([replace(each, cells=[each.cells[i] for i in kept]) for each in columns])


def groups_table(groups: list[Group]) -> tuple[Table, str]:
    """What differs between groups, a column a group, or of many a row a group; and its style."""
    keys = ["rows", *groups[0].values]
    values = [[", ".join(row.label for row in g.rows), *g.values.values()] for g in groups]
    letters = [group.letter for group in groups]
    if len(groups) > MATRIX:
        rows = [[letter, *own] for letter, own in zip(letters, values, strict=True)]
        return Table.of(["Group", *keys], rows, range(len(keys) + 1)), "cards matrix always"
    rows = [[key, *own] for key, own in zip(keys, zip(*values, strict=True), strict=True)]
    return Table.of(["Key", *letters], rows, range(len(letters) + 1)), "cards matrix"


def score_table(name: str, lines: list[ScoreLine], rows: list[Row]) -> Table:
    """The scores of an evaluation: means over seeds, and gaps in small print."""

    def cell(score: ScoreCell | None) -> Cell:
        if score is None:
            return Cell(MISSING)
        gap = (with_interval(score.gap, signed=True),) if score.gap else ()
        return Cell(in_digits(score.mean.mean), small=gap)

    guessed = any(line.chance is not None for line in lines)
    heads = [name, *["Guess"] * guessed, *(row.label for row in rows)]
    cells: list[list[str | Cell]] = [
        [line.of or "all", *[fixed(line.chance, 3)] * guessed, *map(cell, line.cells)]
        for line in lines
    ]
    return Table.of(heads, cells)


def grid_table(grid: Grid) -> Table:
    lines = [
        [Cell(value), *(Cell(fixed(x, 2), shade=x) for x in cells)] for value, cells in grid.lines
    ]
    return Table.of([grid.fact, *grid.levels], lines)


def reaching_table(rows: list[Row]) -> Table | None:
    """The tokens after which rows answered tasks right; None where no task was logged."""

    def cell(times: Times | None) -> Cell:
        if times is None:
            return Cell(MISSING)
        return Cell(compact(times.median), small=(f"{times.count} of {len(times.tokens)}",))

    lines = [[Cell(task), *map(cell, times)] for task, times in reaching(rows)]
    return Table.of(["Task", *(row.label for row in rows)], lines) if lines else None


def runs_table(rows: list[Row], root: str) -> Table:
    """Every run, with the command that made it.

    Args:
        root: the directory that paths are relative to.
    """
    lines: list[list[str | Cell]] = []
    for row in rows:
        for run in row.runs:
            losses, command = run.series("eval/loss").values, run.facts.get("command")
            small = (command,) if isinstance(command, str) else ()
            lines.append(
                [
                    row.label,
                    str(run.cfg.seed),
                    Cell(os.path.relpath(run.path.absolute(), root), small=small),
                    compact(run.metrics.tokens[-1] if len(run.metrics.tokens) else None),
                    fixed(losses[-1] if len(losses) else None),
                    clock((run.summary or {}).get("seconds")),
                    run.state,
                ]
            )
    heads = ["Row", "Seed", "Directory", "Tokens", "Held-out loss", "Time", "State"]
    return Table.of(heads, lines, (0, 2, 6))
