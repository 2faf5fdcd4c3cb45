"""Equivalence: that a gap is small is shown, not merely that none was."""

from dataclasses import dataclass

from diffllm.statistics.families import ALPHA
from diffllm.statistics.gaps import Gap


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests (Schuirmann, 1987) of a gap against ± a margin."""

    p: float
    """The larger of the two one-sided p: that of "above -margin" and that of "below margin"."""
    low: float
    """Lower end of the 1 - 2 alpha interval."""
    high: float
    """Upper end of it."""
    inside: bool
    """Whether this interval lies within ±margin; the same as p below alpha, but where nothing
    varies between seeds: p is then 1."""


def equivalence(gap: Gap, margin: float, alpha: float = ALPHA) -> Equivalence | None:
    """Test whether a gap lies within ±margin; None without a standard error.

    Raises ValueError for a margin that is not above 0.
    """
    if not margin > 0:
        raise ValueError(f"margin={margin} must be above 0")
    interval, below, above = gap.interval(1 - 2 * alpha), gap.p_below(margin), gap.p_above(-margin)
    if interval is None or below is None or above is None:
        return None
    low, high = interval
    return Equivalence(max(below, above), low, high, -margin < low and high < margin)
