"""Text of a comparison for the terminal."""

import os
from textwrap import wrap

from diffllm.compare.arms.arm import runs_of
from diffllm.compare.arms.heldout import thin_note
from diffllm.compare.arms.sentences import (
    MISSING,
    ascii_minus,
    compact,
    with_interval,
)
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.notes import is_early, training_length
from diffllm.compare.report.results import (
    divergence,
    few_seeds_note,
    has_gaps,
    has_intervals,
    holm_sentence,
    loss_interval,
    pairing_note,
    trend_sentences,
)
from diffllm.compare.report.rows import Group, Row, apart_text, in_short
from diffllm.core.printing import Table

LINE_WIDTH = 100
"""Characters per line."""
MOST_NOTES = 10


def whole_text(comparison: Comparison) -> str:
    lines = [table_text(comparison)]
    notes = [ascii_minus(sentence) for sentence in trend_sentences(comparison.rows)]
    notes += comparison.notes[:MOST_NOTES]
    omitted = len(comparison.notes) - MOST_NOTES
    if omitted > 0:
        notes.append(f"the page has {omitted} more notes")
    if notes:
        lines.append("")
    for note in notes:
        lines.append(f"note: {note}")
    return "\n".join(lines)


def loss_table(comparison: Comparison) -> Table:
    """Return the table of mean losses and gaps, with 95% intervals."""
    heads = ["", "held-out loss", f"gap to {comparison.baseline}", "seeds", "parameters"]
    table = Table.of(heads, [row_cells(row) for row in comparison.rows], left=range(len(heads)))
    if has_gaps(comparison.rows):
        return table
    without_gaps = [column for column in table.columns if column.title != heads[2]]
    return Table(without_gaps)


def table_text(comparison: Comparison) -> str:
    """Return an ASCII table of mean losses and gaps, at most `LINE_WIDTH` characters wide."""
    rows = comparison.rows
    runs = runs_of(rows)
    lines = loss_table(comparison).text(LINE_WIDTH)
    lines += interval_lines(rows)
    warnings = [*comparison.warnings, few_seeds_note(rows), thin_note(runs)]
    for warning in warnings:
        if warning:
            lines += wrap(f"warning: {warning}", LINE_WIDTH)
    if is_early(runs):
        lines.append(training_length(runs))
    lines += diverged_lines(rows)
    if len(comparison.groups) > 1:
        reason = apart_text(comparison.groups, comparison.differences)
        lines += ["", *wrap(f"{reason}:", LINE_WIDTH)]
        lines += map(group_line, comparison.groups)
    return "\n".join(map(ascii_minus, lines))


def interval_lines(rows: list[Row]) -> list[str]:
    """Explain the numbers of the table, and their intervals if there are several seeds."""
    if not has_intervals(rows):
        return ["Nats per token; a single seed has no interval."]
    lines = ["Nats per token, means over seeds; 95% intervals in brackets."]
    if any(row.gap and row.gap.holds_zero for row in rows):
        lines.append("An interval that contains 0 shows no difference.")
    lines += wrap(pairing_note(rows, "Intervals", loss_interval), LINE_WIDTH)
    return lines + wrap(holm_sentence(rows), LINE_WIDTH)


def diverged_lines(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row.diverged:
            lines.append(f"{row.label}: {divergence(row)}.")
    if lines:
        lines.append("Losses and gaps exclude diverged runs; their share is in brackets.")
    return lines


def group_line(group: Group) -> str:
    """Return the letter, the directory and the settings of a group of comparable rows."""
    paths = [run.path for run in runs_of(group.rows)]
    place = str(paths[0])
    if len(paths) > 1:
        place = os.path.commonpath([path.parent for path in paths])
    name = f"  {group.letter}  {place}: "
    return name + in_short(group, max(LINE_WIDTH - len(name), 20))


def row_cells(row: Row) -> list[str]:
    seeds = row.seeds_text
    if row.diverged:
        seeds += f", {row.diverged} diverged"
    return [
        row.label,
        with_interval(row.loss) if row.loss else MISSING,
        with_interval(row.gap, signed=True) if row.gap else "",
        seeds,
        compact(row.values.get("parameters")),
    ]
