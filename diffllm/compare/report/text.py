"""A comparison in words and plain text: a sentence a variant, and a table for a terminal."""

import os
from textwrap import wrap

from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.find import shortlist
from diffllm.compare.report.gap_statistics import NAMED, holm_sentence
from diffllm.compare.report.groups import in_short, keys_apart
from diffllm.compare.report.numbers import (
    MISSING,
    ascii_minus,
    compact,
    finite,
    fixed,
    plural,
    share_words,
    with_interval,
)
from diffllm.compare.report.rows import Row
from diffllm.core.printing import Table
from diffllm.evaluation.evaluation import SHARE

WIDTH = 100
"""Columns of a terminal that a table takes at most."""
EQUAL = 0.0005
"""Share by which totals of parameters may differ and be called equal."""
NOTES = 10
"""Notes that are printed at most; the page has all."""


def size_against(row: Row, base: Row) -> str:
    """ "3.7% more parameters"; nothing where one of the sizes is unknown."""
    size, other = (finite(each.values.get("parameters")) for each in (row, base))
    if not size or not other:
        return ""
    share = size / other - 1
    if abs(share) < EQUAL:
        return "equal parameters"
    return f"{abs(share):.1%} {'more' if share > 0 else 'fewer'} parameters"


def gap_sentence(row: Row) -> str:
    """ "diff_v2 -0.200 (-0.313 to -0.088) against standard, 2 seeds, 3.7% more parameters"; nothing
    for a row without a gap."""
    if row.gap is None or row.baseline is None:
        return ""
    said = f"{row.label} {with_interval(row.gap, signed=True)} against {row.baseline.label}"
    size = size_against(row, row.baseline)
    lost = [divergence(row), divergence(row.baseline, f" of {row.baseline.label}")]
    return ", ".join(filter(None, [said, plural(row.gap.seeds, "seed"), size, *lost]))


def divergence(row: Row, of: str = "", share: bool = True) -> str:
    """ "1 of 3 seeds diverged (33%, 0.84% to 91%)"; nothing if none did."""
    if not row.diverged:
        return ""
    said = f"{row.diverged} of {row.diverged_share.runs} seeds{of} diverged"
    return f"{said} ({share_words(row.diverged_share)})" if share else said


def finding(row: Row, bases: list[Row]) -> str:
    """The first sentence about a row: its gap, else its loss.

    Args:
        bases: the rows that gaps are measured from.
    """
    if row.gap is not None:
        return gap_sentence(row)
    if row.loss is None or finite(row.loss.mean) is None:
        return f"{row.label}: {divergence(row) or 'not finished'}"
    parts = [f"{row.label} held-out loss {with_interval(row.loss)}"]
    if any(row is base for base in bases):
        parts.append("the baseline")
    if not bases and (entropy := finite(unigram_entropy(row))) is not None:
        side = "under" if row.loss.mean <= entropy else "over"
        apart = fixed(abs(entropy - row.loss.mean), 2)
        parts.append(f"{apart} {side} the unigram entropy {fixed(entropy, 3)}")
    many = [plural(row.loss.seeds, "seed")] if bases or len(row.runs) > 1 else []
    return ", ".join(filter(None, [*parts, *many, divergence(row)]))


def unigram_entropy(row: Row) -> float | None:
    """Nats a token that a model of token frequencies alone would need on the held-out text."""
    return row.runs[0].facts.get("heldout_unigram_entropy")


def table_text(comparison: Comparison) -> str:
    """Means, gaps and intervals, a line a row, in plain ASCII of at most `WIDTH` columns, unless a
    label alone is longer; where not all rows can be compared, what tells them apart."""
    head = ["", "held-out loss", "", "seeds", "parameters"]
    gaps = any(row.gap for row in comparison.rows)
    if gaps:
        head[2] = f"gap to {comparison.baseline}"
    lines = [head, *map(row_cells, comparison.rows)]
    if not gaps:
        lines = [[*line[:2], *line[3:]] for line in lines]
    text = [*aligned(lines), *explanation(comparison)]
    if len(comparison.groups) > 1:
        text += ["", *groups_text(comparison)]
    return "\n".join(ascii_minus(line) for line in text)


def whole_text(comparison: Comparison) -> str:
    """The table, and the first notes below it, a line each."""
    notes = [f"note: {note}" for note in comparison.notes[:NOTES]]
    if more := len(comparison.notes[NOTES:]):
        notes.append(f"note: the page has {more} more notes")
    parts = [
        table_text(comparison),
        *evaluations_text(comparison),
        *([""] if notes else []),
        *notes,
    ]
    return "\n".join(parts)


def evaluations_text(comparison: Comparison) -> list[str]:
    """Shares of right answers of all levels of a task together, a line a row and task."""
    lines = []
    for each in comparison.evaluated:
        if each.unit != SHARE:
            continue
        for row, cell in zip(comparison.rows, each.lines[0].cells, strict=True):
            if cell:
                gap = with_interval(cell.gap, signed=True) if cell.gap else ""
                lines.append([each.name, row.label, fixed(cell.mean.mean, 3), gap])
    if not lines:
        return []
    head = ["task", "", "right", "gap"]
    text = [ascii_minus(line) for line in aligned([head, *lines])]
    return ["", *text, "Shares of right answers, means over levels and seeds; the page has each."]


def aligned(lines: list[list[str]]) -> list[str]:
    """Cells below each other; where that is too wide, the first has a line of its own."""
    heads, *rows = lines
    return Table.of(heads, rows, left=range(len(heads))).text(WIDTH)


def explanation(comparison: Comparison) -> list[str]:
    """Explain the numbers of a table."""
    lost = [f"{row.label}: {said}." for row in comparison.rows if (said := divergence(row))]
    if lost:
        lost.append("Runs that diverged are in no loss or gap; in brackets their share.")
    if not any(row.loss and row.loss.low is not None for row in comparison.rows):
        return ["Nats a token; one seed has no interval.", *lost]
    notes = ["Nats a token, means over seeds; in brackets 95% intervals."]
    if any(row.gap and row.gap.holds_zero for row in comparison.rows):
        notes.append("An interval that holds 0 shows no difference.")
    return [*notes, *holm_lines(comparison.rows), *lost]


def holm_lines(rows: list[Row]) -> list[str]:
    """Which gaps survive Holm's correction, as many of them named as a line holds."""
    said = [holm_sentence(rows, most) for most in range(NAMED, 0, -1)]
    short = [sentence for sentence in said if len(sentence) <= WIDTH]
    return [text for text in short[:1] or [said[-1].partition(":")[0] + "."] if text]


def groups_text(comparison: Comparison) -> list[str]:
    """Why not all rows can be compared, and a line a group."""
    lines = wrap(f"{apart_text(comparison)}:", WIDTH)
    for group in comparison.groups:
        runs = [run.path for row in group.rows for run in row.runs]
        where = runs[0] if len(runs) == 1 else os.path.commonpath([run.parent for run in runs])
        name = f"  {group.letter}  {where}: "
        lines.append(name + in_short(group, max(WIDTH - len(name) - len(" and 20 more"), 20)))
    return lines


def apart_text(comparison: Comparison, most: int = 5) -> str:
    """Which keys keep rows from being compared."""
    keys = keys_apart(comparison.groups, list(comparison.differences))
    return (
        f"{len(comparison.groups)} groups of rows that cannot be compared with each other; they "
        f"differ in {shortlist(keys, most)}"
    )


def row_cells(row: Row) -> list[str]:
    """The label, and loss, gap, seeds and parameters as text."""
    loss = with_interval(row.loss) if row.loss else MISSING
    gap = with_interval(row.gap, signed=True) if row.gap else ""
    seeds, runs = (row.loss.seeds if row.loss else 0), len(row.runs)
    many = f"{seeds}" if seeds == runs else f"{seeds} of {runs}"
    many += f", {row.diverged} diverged" if row.diverged else ""
    return [row.label, loss, gap, many, compact(row.values.get("parameters"))]
