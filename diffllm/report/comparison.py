"""What a report says: a row for every combination of swept keys, its seeds side by side."""

from dataclasses import dataclass, field
from typing import Any

from diffllm.report.runs import Run


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with its 95% interval; no interval from a single seed."""

    mean: float
    low: float | None = None
    high: float | None = None
    seeds: int = 1


@dataclass
class Row:
    """The runs of one combination of swept keys."""

    label: str
    """"diff_v2", or "diff_v2 lr=0.001" where more than the variant was swept."""
    keys: dict[str, Any]
    """The swept keys and this row's values of them; `attention` first."""
    runs: list[Run]
    """By seed."""
    loss: Estimate | None
    """Final held-out loss, nats a token; None while no run has one."""
    gap: Estimate | None
    """Of the loss to the baseline's over the same seeds, paired; None for the baseline itself, and
    where the two cannot be compared."""
    values: dict[str, Any]
    """All columns of the CSV, in order."""
    baseline: "Row | None" = None
    """The row that the gap is measured from; None where `gap` is, and for the baseline itself."""
    diverged: int = 0
    """Finished runs whose loss is not finite: they are in no mean."""


@dataclass(frozen=True)
class Difference:
    """A key that makes rows incomparable."""

    key: str
    """ "steps", "data.dataset", "corpus", ..."""
    values: dict[str, list[str]]
    """Each value, as text, and the labels of the rows that have it."""


@dataclass
class Comparison:
    """All that a report shows."""

    title: str
    rows: list[Row]
    baseline: str | None
    """The variant that gaps are measured from."""
    differences: list[Difference] = field(default_factory=list)
    """Empty where all rows are comparable."""
    notes: list[str] = field(default_factory=list)
    """Unfinished runs, runs that could not be read, missing seeds: a sentence each."""
