"""Comparison of the runs of two variants, including the diverged runs.

A t test ignores diverged runs, so it favours the variant that diverges more often. Therefore the
p-value of a loss gap is 1 if the variant with the lower mean loss diverged more often.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from diffllm.statistics.estimates import CONFIDENCE
from diffllm.statistics.gap_tests import Gap, Seed, paired, seed_correlation, welch


@dataclass(frozen=True)
class Share:
    """Number of diverged runs, and number of all ended runs (diverged or not), of one variant."""

    diverged: int
    runs: int

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper-Pearson 95% confidence interval of the probability that a run diverges."""
        from scipy.special import betaincinv  # binomtest's root finder is exact to 2e-12 only

        k, n, tail = self.diverged, self.runs, (1 - CONFIDENCE) / 2
        low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
        high = float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
        return low, high


def diverged_more(own: Share, base: Share) -> bool:
    return own.diverged * base.runs > base.diverged * own.runs


def p_all_against_none(diverged: int, finished: int) -> float:
    """Return the p-value if all runs of one variant and no run of the other diverged.

    The alternative is that runs of the first variant diverge more often. The p-value (Barnard,
    1945) is the probability of this outcome, maximised over a common probability of divergence.

    Args:
        diverged: number of runs of the variant whose runs all diverged.
        finished: number of runs of the variant whose runs all ended finite.
    """
    n, m = diverged, finished
    p: float = n**n * m**m / (n + m) ** (n + m)
    return p


@dataclass(frozen=True)
class ArmComparison:
    """Gaps in final loss between two variants, own minus base, and numbers of diverged runs."""

    paired: Gap | None
    """Gap over the seeds with finite losses of both variants; None without such a seed."""
    welch: Gap | None
    """Gap between the means of all finite losses; None if a variant has no finite loss."""
    correlation: float | None
    """Pearson's correlation of the losses over common seeds; None for few seeds or equal losses."""
    own: Share
    base: Share

    @property
    def favours_diverging(self) -> bool:
        """Whether the variant with the lower mean loss has the larger share of diverged runs.

        Both means are over the seeds with finite losses of both variants. If no seed has finite
        losses of both variants, the result is False.
        """
        if self.paired is None:
            return False
        better, other = (self.own, self.base) if self.paired.mean < 0 else (self.base, self.own)
        return diverged_more(better, other)

    @property
    def p(self) -> float | None:
        """Two-sided p-value of the paired t test of the loss gap.

        None if fewer than two seeds have finite losses of both variants. 1 instead of the result of
        the test if `favours_diverging` is True.
        """
        p = self.paired.p if self.paired else None
        return 1.0 if p is not None and self.favours_diverging else p

    @property
    def p_diverged(self) -> float:
        """Two-sided p-value of Fisher's exact test; null hypothesis: equal divergence rates."""
        if not self.own.diverged and not self.base.diverged:
            return 1.0
        from scipy.stats import fisher_exact

        table = [[side.diverged, side.runs - side.diverged] for side in (self.own, self.base)]
        return float(fisher_exact(table).pvalue)


def compare_arms(
    own: Mapping[Seed, float | None], base: Mapping[Seed, float | None]
) -> ArmComparison:
    """Compare the final losses and the numbers of diverged runs of two variants.

    Args:
        own, base: final loss of each seed; None, NaN or infinity for a diverged run.
    """
    first, second = (
        {seed: loss for seed, loss in arm.items() if loss is not None and math.isfinite(loss)}
        for arm in (own, base)
    )
    return ArmComparison(
        paired(first, second),
        welch(first, second),
        seed_correlation(first, second),
        Share(len(own) - len(first), len(own)),
        Share(len(base) - len(second), len(base)),
    )
