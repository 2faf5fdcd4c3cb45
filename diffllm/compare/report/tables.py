"""Tables of a report: the columns of report.csv, and the tables of the page."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from diffllm.compare.arms.budget import BUDGETS
from diffllm.compare.arms.gap import ArmGap
from diffllm.compare.arms.run import Run, run_value
from diffllm.compare.arms.sentences import (
    MISSING,
    clock,
    compact,
    digits_for,
    ends,
    finite,
    fixed,
    in_digits,
    in_words,
    p_text,
    percent,
    share_words,
    short,
    with_interval,
)
from diffllm.compare.report.evaluations import ScoreCell, ScoreLine
from diffllm.compare.report.results import (
    divergence,
    gap_tag,
    has_intervals,
    lost_seeds,
    tested_rows,
)
from diffllm.compare.report.rows import Group, Row
from diffllm.compare.report.styles import RowStyle
from diffllm.core.printing import Cell, Table, TableColumn
from diffllm.metrics.display import spike_text
from diffllm.metrics.table import METRICS, metric_of


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
    values = {"variant": row.keys["attention"], **row.keys}
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
        **gap_values(row),
        "baseline": row.baseline and row.baseline.label,
        "incomparable": incomparable or None,
        "group": row.group or None,
    }
    for series in ("loss", "grad"):
        rate = row.events(series)
        for end, field in EVENTS.items():
            values[f"{series}_events{end}"] = rate and getattr(rate, field)
    values["seconds"] = row.summary_mean("seconds")
    values["bits_per_byte"] = row.summary_mean("heldout_bits_per_byte")
    for metric in METRICS:
        if metric.column:
            values[metric.quantity] = row.value(metric)
    return values


def gap_values(row: Row) -> dict[str, Any]:
    """Map the columns of report.csv about the gap of `row` to their values."""
    outcome, gap = row.outcome, row.gap
    paired = outcome and outcome.paired
    slope = row.trend and row.trend.slope
    diverged = row.diverged_share.interval if row.ended else (None, None)
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
        "diverged_low": diverged[0],
        "diverged_high": diverged[1],
        "diverged_p": outcome and outcome.p_diverged,
    }
    for name in BUDGETS:
        equal = row.equal.get(name)
        values[f"gap_at_{name}"] = equal and equal.gap.mean
        values |= ends(f"gap_at_{name}", equal and equal.gap)
        values[f"gap_at_{name}_of"] = equal and equal.at
    return values


def csv_text(rows: list[Row]) -> str:
    cells = [[Cell(value=value) for value in row.values.values()] for row in rows]
    return Table.of(list(rows[0].values), cells).csv()


def number_cell(how: Callable[[Any], str], name: str) -> Callable[[Row], Cell]:

    def cell(row: Row) -> Cell:
        value = row.values.get(name)
        odd = value is not None and finite(value) is None
        return Cell(how(value), finite(value), tag="not finite" if odd else "")

    return cell


def loss_cell(row: Row) -> Cell:
    tag = divergence(row, share=False)
    if row.loss is None:
        return Cell(MISSING, tag=tag)
    bits = finite(row.values.get("bits_per_byte"))
    small = (in_words(row.loss), "" if bits is None else f"{fixed(bits, 3)} bits per byte")
    return Cell(fixed(row.loss.mean), row.loss.mean, tuple(filter(None, small)), tag)


def gap_cell(row: Row) -> Cell:
    if row.gap is None:
        return Cell("", tag="baseline") if row.is_baseline else Cell(MISSING)
    bounds, mean = in_words(row.gap, signed=True), row.gap.mean
    tag = (lost_seeds(row) or [gap_tag(row)])[0]
    return Cell(fixed(mean, signed=True), mean, (bounds,) if bounds else (), tag)


def seeds_cell(row: Row) -> Cell:
    seeds, runs = row.values["seeds"], len(row.runs)
    tag = f"{row.diverged} diverged: {share_words(row.diverged_share)}" if row.diverged else ""
    return Cell(f"{seeds}" if seeds == runs else f"{seeds} of {runs}", seeds, tag=tag)


def events_cell(row: Row, series: str) -> Cell:
    if not (rate := row.events(series)):
        return Cell(MISSING)
    interval = f"{short(rate.low, 2)} to {short(rate.high, 2)}"
    return Cell(short(rate.value, 2), rate.high, (interval,))


PAGE = {
    "loss": PageColumn(
        "Held-out loss", "nats per token",
        "held-out loss after the last step, nats per token, mean over seeds", loss_cell,
    ),
    "gap": PageColumn(
        "Gap to {}", "nats per token, paired",
        "loss minus the baseline's, mean over the common seeds", gap_cell,
    ),
    "parameters": PageColumn(
        "Parameters", "", "number in the whole decoder", number_cell(compact, "parameters")
    ),
    "active_parameters": PageColumn(
        "Active parameters", "", "number that one token uses",
        lambda row: Cell(
            MISSING if (active := row.values["active_parameters"]) == row.values["parameters"]
            else compact(active), finite(active),
        ),
    ),
    "flops_per_token": PageColumn(
        "FLOPs", "per token",
        "training FLOPs per token, forward and backward; attention counts visible keys only",
        number_cell(compact, "flops_per_token"),
    ),
    "tokens": PageColumn(
        "Tokens", "", "training tokens of a complete run",
        number_cell(compact, "tokens"),
    ),
    "seeds": PageColumn(
        "Seeds", "", "number of finished runs in the mean loss", seeds_cell
    ),
    **{
        f"{series}_events_per_1000": PageColumn(
            title, "events per 1,000 steps", f"spike events of the {what} without its trend, "
            "per 1,000 judged steps of all ended seeds", partial(events_cell, series=series),
        )
        for series, title, what in (
            ("loss", "Loss spikes", "loss"), ("grad", "Gradient spikes", "log gradient norm"),
        )
    },
    "seconds": PageColumn(
        "Time", "per run", "wall-clock time of a finished run over all its starts; mean over "
        "seeds", number_cell(clock, "seconds"),
    ),
    **{
        metric.quantity: PageColumn(
            column.title, column.unit, metric.column_meaning,
            number_cell(percent if column.percent else short, metric.quantity),
        )
        for metric in METRICS if (column := metric.column) and column.title
    },
}  # fmt: skip
"""Columns of the page, by name of the column in report.csv."""
WITH_INTERVAL = ("loss", "gap")
"""Columns with a 95% interval over seeds, if there are several seeds."""
KEPT = ("Held-out loss", "Gap to", "Diverged")
"""Beginnings of titles of columns that are kept even if all rows have equal values."""
SPIKE_COUNTS = (
    "spikes/loss_total", "spikes/grad_total", "spikes_detrended/loss_total",
    "spikes_detrended/grad_total",
)  # fmt: skip
EVENTS = {"": "count", "_judged": "steps", "_per_1000": "value", "_low": "low", "_high": "high"}


def table_columns(rows: list[Row], baseline: str | None) -> list[TableColumn]:
    """Return the columns of the results table that have a value in at least one row."""
    made = []
    for name, (title, unit, meaning, cell) in PAGE.items():
        cells = [cell(row) for row in rows]
        if name in WITH_INTERVAL and has_intervals(rows):
            unit += ", 95% interval"
        if any(each.text != MISSING or each.tag for each in cells):
            made.append(TableColumn(title.format(baseline), cells, unit, f"{name}: {meaning}"))
    return made


def fold_constant(table: Table) -> tuple[Table, list[str]]:
    """Remove columns in which all cells are equal.

    The first column, and columns whose title starts with a string in KEPT, are never removed. If
    the table has only one row, only columns with a missing value or 0 are removed.

    Returns the remaining table, and sentences that state the values of the removed columns.
    """
    kept, folded = [table.columns[0]], dict[str, list[str]]()
    for column in table.columns[1:]:
        cell = max(column.cells, key=lambda each: finite(each.value) or 0.0)
        zero = cell.text in ("0", "0%")
        shown = {(each.text, each.tag, zero or each.small) for each in column.cells}
        same = len(shown) == 1 and not cell.tag
        if not same or column.title.startswith(KEPT):
            kept.append(column)
        elif cell.text == MISSING:
            folded.setdefault("Not measured", []).append(column.title)
        elif zero:
            unit = f"({', '.join(cell.small)} {column.unit})" if cell.small else column.unit
            folded.setdefault("All zero", []).append(f"{column.title} {unit}".strip())
        elif len(column.cells) > 1:
            words = filter(None, (column.title, column.unit, cell.line))
            folded.setdefault("Equal as shown in all rows", []).append(" ".join(words))
        else:
            kept.append(column)
    return Table(kept), [f"{name}: {', '.join(said)}." for name, said in folded.items()]


HOLM = "p, Holm"
TESTS = (
    "Row", "Pairs", ("Paired gap", "nats per token, 95%"), "p", HOLM,
    ("Unpaired gap", "Welch, 95%"), "Welch's p", ("Documents and seeds", "95%"),
    ("Correlation", "between seeds"), ("Trend", "per doubling of tokens, 95%"),
    ("Diverged", "95%, and p"),
)  # fmt: skip


def gap_table(rows: list[Row], styles: list[RowStyle]) -> Table | None:
    """Return the table of tests; None if no gap has a test and no run diverged."""
    several = len(tested_rows(rows)) > 1
    lines = []
    for row, style in zip(rows, styles, strict=True):
        if row.against is not None and row.outcome is not None:
            names = Cell(row.label, small=(f"against {row.against.label}",), icon=style.swatch)
            lines.append([names, *test_cells(row, row.outcome, several)])
    if not lines or not (tested_rows(rows) or any(row.diverged for row in rows)):
        return None
    table = Table.of(TESTS, lines)
    if several:
        return table
    # Holm's correction does not change a single p.
    return Table([column for column in table.columns if column.title != HOLM])


def test_cells(row: Row, gap: ArmGap, several: bool) -> list[Cell]:
    """Return the cells of a gap in the table of tests, in the order of TESTS.

    Args:
        several: whether the page has several gaps, so that the tag is next to Holm's p.
    """
    paired, welch = gap.paired, gap.welch
    return [
        Cell(str(paired.seeds) if paired else "0"),
        Cell(with_interval(paired.estimate, True, 4) if paired else MISSING),
        Cell(p_text(paired.p if paired else None), tag="" if several else gap_tag(row)),
        Cell(p_text(row.p_holm), tag=gap_tag(row)),
        Cell(with_interval(welch.estimate, True, 4) if welch else MISSING),
        Cell(p_text(welch.p if welch else None)),
        documents_cell(gap),
        Cell(fixed(gap.correlation, 2, signed=True)),
        Cell(with_interval(row.trend.slope.estimate, True) if row.trend else MISSING),
        diverged_cell(gap),
    ]


def documents_cell(gap: ArmGap) -> Cell:
    if gap.over_documents is None:
        return Cell(MISSING)
    return Cell(in_words(gap.over_documents.estimate, signed=True) or MISSING)


def diverged_cell(gap: ArmGap) -> Cell:
    candidate, base = gap.candidate, gap.base
    if not candidate.diverged and not base.diverged:
        return Cell("no run")
    low, high = candidate.interval
    text = f"{candidate.diverged} of {candidate.runs} ({low:.0%} to {high:.0%}) against "
    text += f"{base.diverged} of {base.runs}"
    return Cell(text, small=(f"p {p_text(gap.p_diverged)}, Fisher",))


def groups_table(groups: list[Group]) -> Table:
    heads = ["Group", "rows", *groups[0].values]
    lines = [
        [group.letter, ", ".join(row.label for row in group.rows), *group.values.values()]
        for group in groups
    ]
    return Table.of(heads, lines, range(len(heads)))


def score_table(name: str, lines: list[ScoreLine], rows: list[Row]) -> Table:
    """Return a table of scores with one column per evaluated row of the report."""

    def cell(score: ScoreCell | None) -> Cell:
        if score is None:
            return Cell(MISSING)
        small = [in_words(score.mean, digits=digits_for(score.mean))]
        if score.over_examples:
            small.append("{:.3f} to {:.3f} over examples".format(*score.over_examples))
        small += [f"gap {with_interval(score.gap, signed=True)}"] if score.gap else []
        return Cell(in_digits(score.mean.mean), small=tuple(filter(None, small)))

    guessed = any(line.chance is not None for line in lines)
    columns = [TableColumn(name, [Cell(line.of or "all") for line in lines], left=True)]
    if guessed:
        columns.append(TableColumn("Chance", [Cell(fixed(line.chance, 3)) for line in lines]))
    for i, row in enumerate(rows):
        scores = [line.cells[i] for line in lines]
        if any(score is not None for score in scores):
            columns.append(TableColumn(row.label, [cell(score) for score in scores]))
    return Table(columns)


def runs_table(rows: list[Row]) -> Table:
    runs = [(row.label, run) for row in rows for run in row.runs]
    root = os.path.commonpath([run.path.absolute().parent for _, run in runs])
    lines: list[list[str | Cell]] = []
    for label, run in runs:
        sample, command = run.series("eval/loss").values, run.facts.get("command")
        loss = run.final_loss if run.ended or not len(sample) else float(sample[-1])
        path = os.path.relpath(run.path.absolute(), root)
        lines.append(
            [
                label,
                str(run.cfg.seed),
                Cell(path, small=(command,) if isinstance(command, str) else ()),
                compact(int(run.metrics.tokens[-1]) if len(run.metrics.tokens) else None),
                Cell(fixed(loss), small=() if run.ended or loss is None else ("held-out sample",)),
                clock((run.summary or {}).get("seconds")),
                spikes_cell(run),
                run.state,
            ]
        )
    heads = ["Row", "Seed", "Directory", "Tokens", "Held-out loss", "Time", "Spikes", "State"]
    return Table.of(heads, lines, (0, 2, 6, 7))


def spikes_cell(run: Run) -> Cell:
    counts = {name: finite(run_value(run, metric_of(name))) for name in SPIKE_COUNTS}
    if None in counts.values():
        return Cell(MISSING)
    of_values, _, without_trend = spike_text(counts).partition("; ")
    return Cell(of_values, small=(without_trend,))
