"""The tests behind the gaps of a page: which survive Holm's correction, and a table of all."""

from typing import NamedTuple

from diffllm.compare.report.find import shortlist
from diffllm.compare.report.numbers import MISSING, fixed, in_words
from diffllm.compare.report.rows import Row
from diffllm.statistics.arm_comparison import Share
from diffllm.statistics.gap_tests import ALPHA, FEWEST, Gap
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


class GapLine(NamedTuple):
    """A line of the table of tests, as text."""

    row: int
    """The row's place in the comparison."""
    base: str
    seeds: str
    paired: str
    p: str
    p_holm: str
    welch: str
    welch_p: str
    documents: str
    """The interval over documents and seeds; "" where it is withheld."""
    correlation: str
    diverged: str
    diverged_p: str
    note: str


def gap_lines(rows: list[Row]) -> list[GapLine]:
    """A line for every row that was compared with a baseline, also where its runs all diverged."""
    found = []
    for index, row in enumerate(rows):
        base, against = row.against, row.outcome
        if against is None or base is None:
            continue
        paired, unpaired, r = against.paired, against.welch, against.correlation
        found.append(
            GapLine(
                index,
                base.label,
                str(paired.seeds) if paired else "0",
                interval_text(paired),
                p_text(paired.p if paired else None),
                p_text(row.p_holm),
                interval_text(unpaired),
                p_text(unpaired.p if unpaired else None),
                in_words(row.documents, signed=True) if row.documents else "",
                fixed(r, 2, signed=True),
                share_text(against.own, against.base),
                p_text(against.p_diverged) if against.own.diverged + against.base.diverged else "",
                gap_note(row),
            )
        )
    return found


def documents_text(rows: list[Row]) -> str:
    """Why gaps have no interval over documents and seeds: each reason once."""
    reasons = dict.fromkeys(row.no_documents for row in rows if row.no_documents)
    if not reasons:
        return ""
    return f"An interval over documents and seeds together is {'; '.join(reasons)}."


def interval_text(gap: Gap | None) -> str:
    """ "−0.0200 (−0.0313 to −0.0088)"; the mean alone where there is no interval."""
    if gap is None:
        return MISSING
    mean = fixed(gap.mean, signed=True)
    if gap.low is None or gap.high is None:
        return mean
    return f"{mean} ({fixed(gap.low, signed=True)} to {fixed(gap.high, signed=True)})"


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
