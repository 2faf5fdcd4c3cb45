"""The tests behind the gaps of a page: which survive Holm's correction, and a table of all."""

from diffllm.compare.report.find import shortlist
from diffllm.compare.report.numbers import MISSING, fixed, in_words, with_interval
from diffllm.compare.report.rows import Row
from diffllm.compare.report.style import RowStyle
from diffllm.core.printing import Cell, Table
from diffllm.statistics.arm_comparison import Share
from diffllm.statistics.gap_tests import ALPHA, FEWEST
from diffllm.statistics.power_analysis import pairing_pays_above

NAMED = 4
"""Gaps that a sentence names."""


def family(rows: list[Row]) -> list[Row]:
    """The rows whose gap has a test: Holm's correction is over all of these."""
    return [row for row in rows if row.p_holm is not None]


def survives(row: Row) -> bool:
    return row.p_holm is not None and row.p_holm < ALPHA


def holm_sentence(rows: list[Row], most: int = NAMED) -> str:
    """How many gaps survive Holm's correction, and which; nothing where no gap has a test."""
    tested = family(rows)
    if not tested:
        return ""
    if len(tested) == 1:
        (row,) = tested
        what = "shown" if survives(row) else "not shown"
        return f"One gap, p {p_text(row.p_holm)}: {what} at {ALPHA:g}."
    kept = [row.label for row in tested if survives(row)]
    names = f": {shortlist(kept, most)}" if kept else ""
    survive = "survives" if len(kept) == 1 else "survive"
    return f"{len(kept)} of {len(tested)} gaps {survive} Holm's correction at {ALPHA:g}{names}."


def p_text(p: float | None) -> str:
    """ "0.031", "0.0012", "<0.0001"."""
    if p is None:
        return MISSING
    if p < 0.0001:
        return "<0.0001"
    return f"{p:.2f}" if p >= 0.1 else f"{p:.2g}"


HEADS = (
    "Row", "Pairs", ("Paired gap", "nats a token, 95%"), "p", "p, Holm",
    ("Unpaired gap", "Welch, 95%"), ("p", "Welch"), ("Documents and seeds", "bootstrap, 95%"),
    ("Correlation", "between seeds"), ("Diverged", "95%, and p"),
)  # fmt: skip
DOCUMENTS = 7
"""Place of the column that is missing where all intervals are withheld."""


def gap_table(rows: list[Row], styles: list[RowStyle]) -> Table | None:
    """Tabulate the tests of every row that was compared with a baseline, also where its runs all
    diverged; None without any."""
    lines = []
    for row, style in zip(rows, styles, strict=True):
        base, found = row.against, row.outcome
        if base is None or found is None:
            continue
        paired, unpaired = found.paired, found.welch
        p = f"p {p_text(found.p_diverged)}, Fisher"
        lost = found.own.diverged + found.base.diverged
        cells = [
            Cell(row.label, small=(f"against {base.label}",), icon=style.swatch),
            Cell(str(paired.seeds) if paired else "0"),
            Cell(with_interval(paired.estimate, True, 4) if paired else MISSING),
            Cell(p_text(paired.p if paired else None)),
            Cell(p_text(row.p_holm), tag=gap_note(row)),
            Cell(with_interval(unpaired.estimate, True, 4) if unpaired else MISSING),
            Cell(p_text(unpaired.p if unpaired else None)),
            Cell((in_words(row.documents, signed=True) if row.documents else "") or MISSING),
            Cell(fixed(found.correlation, 2, signed=True)),
            Cell(share_text(found.own, found.base), small=(p,) if lost else ()),
        ]
        lines.append(cells)
    if not lines:
        return None
    table = Table.of(HEADS, lines)
    if any(cells[DOCUMENTS].text != MISSING for cells in lines):
        return table
    return Table([each for i, each in enumerate(table.columns) if i != DOCUMENTS])


def documents_text(rows: list[Row]) -> str:
    """Why gaps have no interval over documents and seeds: each reason once."""
    reasons = dict.fromkeys(row.no_documents for row in rows if row.no_documents)
    if not reasons:
        return ""
    return f"An interval over documents and seeds together is {'; '.join(reasons)}."


def share_text(own: Share, base: Share) -> str:
    """ "1 of 3 (1% to 91%) against 0 of 3"; "no run" where none of either did."""
    if not own.diverged and not base.diverged:
        return "no run"
    low, high = own.interval
    return (
        f"{own.diverged} of {own.runs} ({low:.0%} to {high:.0%}) against "
        f"{base.diverged} of {base.runs}"
    )


def gap_note(row: Row) -> str:
    """Why a gap has no p, or one that counts as 1; nothing for others."""
    against = row.outcome
    if against is None:
        return ""
    if against.paired is None:
        return "no seed ended finite in both"
    if against.paired.p is None:
        return "no test from one seed"
    if against.paired.zero_variance:
        return "seeds do not vary: p counts as 1"
    if against.favours_diverging:
        return "in favour of the side that diverged more: p counts as 1"
    return ""


def pairing_text(rows: list[Row]) -> str:
    """From which correlation on pairing pays, for the numbers of seeds that occur."""
    seeds = sorted({row.gap.seeds for row in rows if row.gap and row.gap.seeds >= FEWEST})
    if not seeds:
        return ""
    parts = [f"{pairing_pays_above(n):.2f} ({n} seeds)" for n in seeds]
    return f"Pairing narrows an interval where the correlation is above {', '.join(parts)}."
