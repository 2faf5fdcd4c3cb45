"""A comparison in words and plain text: a sentence a variant, and a table for a terminal."""

from diffllm.report.comparison import Comparison
from diffllm.report.numbers import MISSING, compact, finite, fixed
from diffllm.report.rows import Estimate, Row

WIDTH = 100
"""Columns of a terminal that a table takes at most."""
EQUAL = 0.0005
"""Share by which totals of parameters may differ and be called equal."""


def with_interval(estimate: Estimate, signed: bool = False) -> str:
    """ "-0.200 (-0.313 to -0.088)"; the mean alone where there is no interval."""
    mean, low, high = (fixed(x, 3, signed) for x in (estimate.mean, estimate.low, estimate.high))
    return mean if MISSING in (low, high) else f"{mean} ({low} to {high})"


def counted(number: int, one: str) -> str:
    """ "1 seed", "2 seeds"."""
    return f"{number} {one}{'' if number == 1 else 's'}"


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
    return ", ".join(filter(None, [said, counted(row.gap.seeds, "seed"), size]))


def shows_no_difference(gap: Estimate | None) -> bool:
    """Whether the interval holds 0."""
    return gap is not None and None not in (gap.low, gap.high) and gap.low <= 0 <= gap.high  # type: ignore[operator]


def table_text(comparison: Comparison) -> str:
    """Means, gaps and intervals, a line a row, in plain ASCII of at most `WIDTH` columns."""
    head = ["", "held-out loss", "", "seeds", "parameters"]
    gaps = any(row.gap for row in comparison.rows)
    if gaps:
        head[2] = f"gap to {comparison.baseline}"
    lines = [head, *map(row_cells, comparison.rows)]
    if not gaps:
        lines = [[*line[:2], *line[3:]] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    apart = sum(widths) + 2 * (len(widths) - 1) > WIDTH  # then a label has a line of its own
    text = []
    for label, *cells in lines:
        padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        if apart:
            text += [label] if label else []
            text.append("    " + "  ".join(padded))
        else:
            text.append("  ".join([f"{label:<{widths[0]}}", *padded]))
    notes = ["Nats a token, means over seeds; in brackets 95% intervals."]
    if any(shows_no_difference(row.gap) for row in comparison.rows):
        notes.append("An interval that holds 0 shows no difference.")
    elif not any(row.loss and row.loss.low is not None for row in comparison.rows):
        notes = ["Nats a token; one seed has no interval."]
    return "\n".join(ascii_minus(line.rstrip()) for line in [*text, " ".join(notes)])


def row_cells(row: Row) -> list[str]:
    """The label, and loss, gap, seeds and parameters as text."""
    loss = with_interval(row.loss) if row.loss else MISSING
    gap = with_interval(row.gap, signed=True) if row.gap else ""
    seeds, runs = (row.loss.seeds if row.loss else 0), len(row.runs)
    many = f"{seeds}" if seeds == runs else f"{seeds} of {runs}"
    return [row.label, loss, gap, many, compact(row.values.get("parameters"))]


def ascii_minus(text: str) -> str:
    """Signs and dashes that any terminal has, and that can be searched for."""
    return text.replace("\u2212", "-").replace(MISSING, "-")
