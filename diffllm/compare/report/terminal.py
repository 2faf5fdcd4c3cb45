"""Text of a comparison for the terminal."""

import os
from textwrap import wrap

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
    has_intervals,
    holm_sentence,
    loss_interval,
    pairing_note,
    trend_sentences,
)
from diffllm.compare.report.rows import Row, apart_text, in_short
from diffllm.core.printing import Table

WIDTH = 100
NOTES = 10


def whole_text(comparison: Comparison) -> str:
    trends = map(ascii_minus, trend_sentences(comparison.rows))
    notes = [f"note: {note}" for note in (*trends, *comparison.notes[:NOTES])]
    if more := len(comparison.notes[NOTES:]):
        notes.append(f"note: the page has {more} more notes")
    return "\n".join([table_text(comparison), *[""] * bool(notes), *notes])


def loss_table(comparison: Comparison) -> Table:
    """Return the table of mean losses and gaps, with 95% intervals."""
    rows = comparison.rows
    heads = ["", "held-out loss", f"gap to {comparison.baseline}", "seeds", "parameters"]
    shown = [i for i in range(len(heads)) if i != 2 or any(row.gap for row in rows)]
    lines = [[row_cells(row)[i] for i in shown] for row in rows]
    return Table.of([heads[i] for i in shown], lines, left=range(len(shown)))


def table_text(comparison: Comparison) -> str:
    """Return an ASCII table of mean losses and gaps, at most `WIDTH` characters wide."""
    rows, groups = comparison.rows, comparison.groups
    text = loss_table(comparison).text(WIDTH)
    runs = [run for row in rows for run in row.runs]
    if not has_intervals(rows):
        text.append("Nats per token; a single seed has no interval.")
    else:
        text.append("Nats per token, means over seeds; 95% intervals in brackets.")
        if any(row.gap and row.gap.holds_zero for row in rows):
            text.append("An interval that contains 0 shows no difference.")
        text += wrap(pairing_note(rows, "Intervals", loss_interval), WIDTH)
        text += wrap(holm_sentence(rows), WIDTH)
    warnings = [warning for warning in (few_seeds_note(rows), thin_note(runs)) if warning]
    for warning in (*comparison.warnings, *warnings):
        text += wrap(f"warning: {warning}", WIDTH)
    if is_early(runs):
        text.append(training_length(runs))
    shares = [(row.label, divergence(row)) for row in rows]
    diverged = [f"{label}: {share}." for label, share in shares if share]
    if diverged:
        text += [*diverged, "Losses and gaps exclude diverged runs; their share is in brackets."]
    if len(groups) > 1:
        text += ["", *wrap(f"{apart_text(groups, comparison.differences)}:", WIDTH)]
    for group in groups if len(groups) > 1 else []:
        paths = [run.path for row in group.rows for run in row.runs]
        where = paths[0] if len(paths) == 1 else os.path.commonpath([p.parent for p in paths])
        name = f"  {group.letter}  {where}: "
        text.append(name + in_short(group, max(WIDTH - len(name), 20)))
    return "\n".join(map(ascii_minus, text))


def row_cells(row: Row) -> list[str]:
    loss = with_interval(row.loss) if row.loss else MISSING
    gap = with_interval(row.gap, signed=True) if row.gap else ""
    seeds = f"{row.seeds}" if row.seeds == len(row.runs) else f"{row.seeds} of {len(row.runs)}"
    seeds += f", {row.diverged} diverged" if row.diverged else ""
    return [row.label, loss, gap, seeds, compact(row.values.get("parameters"))]
