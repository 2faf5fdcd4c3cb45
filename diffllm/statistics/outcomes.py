"""Two arms with all their runs, those that diverged among them.

A t test is of the runs that ended with a finite loss. It says nothing of the others, and leaving
them out flatters the arm that has more of them. So the shares that diverged stand beside it, with
an interval and a test of their own, and a gap in favour of the arm that diverged more often is
never significant: its p counts as 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from diffllm.statistics.gaps import Gap, Seed, paired, seed_correlation, welch
from diffllm.statistics.intervals import CONFIDENCE


@dataclass(frozen=True)
class Share:
    """How many of an arm's ended runs diverged."""

    diverged: int
    runs: int

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper and Pearson's 95% interval of the probability that a run diverges."""
        from scipy.special import betaincinv

        k, n, tail = self.diverged, self.runs, (1 - CONFIDENCE) / 2
        low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
        high = float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
        return low, high


def diverged_more(own: Share, base: Share) -> bool:
    return own.diverged * base.runs > base.diverged * own.runs


def fisher(own: Share, base: Share) -> float:
    """Two-sided p of Fisher's exact test that both arms diverge equally often."""
    if not own.diverged and not base.diverged:
        return 1.0
    from scipy.stats import fisher_exact  # a second that few pages need

    table = [[side.diverged, side.runs - side.diverged] for side in (own, base)]
    return float(fisher_exact(table).pvalue)


@dataclass(frozen=True)
class Outcome:
    """One arm against another."""

    paired: Gap | None
    """Over the seeds that ended finite in both; None if there is none."""
    welch: Gap | None
    """Over all finite runs of either arm; None if one has none."""
    correlation: float | None
    """Between the arms over common seeds, from three on."""
    own: Share
    base: Share

    @property
    def favours_diverging(self) -> bool:
        """Whether the gap is in favour of the arm of which a larger share diverged."""
        if self.paired is None:
            return False
        better, other = (self.own, self.base) if self.paired.mean < 0 else (self.base, self.own)
        return diverged_more(better, other)

    @property
    def p(self) -> float | None:
        """The two-sided p that counts in a family; None where there is no test."""
        p = self.paired.p if self.paired else None
        return 1.0 if p is not None and self.favours_diverging else p

    @property
    def p_diverged(self) -> float:
        """Fisher's p that both arms diverge equally often."""
        return fisher(self.own, self.base)


def outcome(own: Mapping[Seed, float | None], base: Mapping[Seed, float | None]) -> Outcome:
    """Compare two arms.

    Args:
        own, base: final loss of every finished run by seed; None, NaN or infinity for one that
            diverged. A run that has not finished is in neither.
    """
    first, second = finite_of(own), finite_of(base)
    return Outcome(
        paired(first, second),
        welch(first, second),
        seed_correlation(first, second),
        Share(len(own) - len(first), len(own)),
        Share(len(base) - len(second), len(base)),
    )


def finite_of(losses: Mapping[Seed, float | None]) -> dict[Seed, float]:
    """The losses of runs that did not diverge."""
    return {seed: loss for seed, loss in losses.items() if loss is not None and math.isfinite(loss)}
