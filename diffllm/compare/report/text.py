"""A comparison as plain text for a terminal."""

import os
from textwrap import wrap

from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.groups import apart_text, in_short
from diffllm.compare.report.notes import divergence, holm_sentence
from diffllm.compare.report.numbers import MISSING, ascii_minus, compact, with_interval
from diffllm.compare.report.rows import Row
from diffllm.core.printing import Table

WIDTH = 100
NOTES = 10


def whole_text(comparison: Comparison) -> str:
    notes = [f"note: {note}" for note in comparison.notes[:NOTES]]
    if more := len(comparison.notes[NOTES:]):
        notes.append(f"note: the page has {more} more notes")
    return "\n".join([table_text(comparison), *[""] * bool(notes), *notes])


def table_text(comparison: Comparison) -> str:
    """Means, gaps and intervals in ASCII, at most `WIDTH` columns wide."""
    rows, groups = comparison.rows, comparison.groups
    heads = ["", "held-out loss", f"gap to {comparison.baseline}", "seeds", "parameters"]
    shown = [i for i in range(len(heads)) if i != 2 or any(row.gap for row in rows)]
    lines = [[row_cells(row)[i] for i in shown] for row in rows]
    text = Table.of([heads[i] for i in shown], lines, left=range(len(shown))).text(WIDTH)
    if not any(row.loss and row.loss.low is not None for row in rows):
        text.append("Nats a token; one seed has no interval.")
    else:
        text.append("Nats a token, means over seeds; in brackets 95% intervals.")
        if any(row.gap and row.gap.holds_zero for row in rows):
            text.append("An interval that holds 0 shows no difference.")
        text += wrap(holm_sentence(rows), WIDTH)
    if lost := [f"{row.label}: {said}." for row in rows if (said := divergence(row))]:
        text += [*lost, "Runs that diverged are in no loss or gap; in brackets their share."]
    if len(groups) > 1:
        text += ["", *wrap(f"{apart_text(groups, comparison.differences)}:", WIDTH)]
    for group in groups if len(groups) > 1 else []:
        runs = [run.path for row in group.rows for run in row.runs]
        where = runs[0] if len(runs) == 1 else os.path.commonpath([run.parent for run in runs])
        name = f"  {group.letter}  {where}: "
        text.append(name + in_short(group, max(WIDTH - len(name), 20)))
    return "\n".join(map(ascii_minus, text))


def row_cells(row: Row) -> list[str]:
    loss = with_interval(row.loss) if row.loss else MISSING
    gap = with_interval(row.gap, signed=True) if row.gap else ""
    seeds = f"{row.seeds}" if row.seeds == len(row.runs) else f"{row.seeds} of {len(row.runs)}"
    seeds += f", {row.diverged} diverged" if row.diverged else ""
    return [row.label, loss, gap, seeds, compact(row.values.get("parameters"))]
