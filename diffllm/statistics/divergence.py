"""Shares of diverged runs of two arms, and the p-value if the runs of one arm all diverged."""

from dataclasses import dataclass

from diffllm.statistics.estimates import CONFIDENCE


@dataclass(frozen=True)
class Share:
    """Number of diverged runs, and number of all ended runs (diverged or not), of one arm."""

    diverged: int
    runs: int

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper-Pearson 95% confidence interval of the probability that a run diverges."""
        from scipy.special import betaincinv  # binomtest's root finder is exact to 2e-12 only

        k, n = self.diverged, self.runs
        tail = (1 - CONFIDENCE) / 2
        # The beta distributions are not defined if no run or all runs diverged.
        low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
        high = float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
        return low, high


def diverged_more(candidate: Share, base: Share) -> bool:
    # Products of integers compare the shares exactly, and an arm may have no runs.
    return candidate.diverged * base.runs > base.diverged * candidate.runs


def p_all_against_none(diverged: int, finished: int) -> float:
    """Return the p-value if all runs of one arm and no run of the other diverged.

    The alternative is that runs of the first arm diverge more often. The p-value (Barnard, 1945) is
    the probability of this outcome, maximised over a common probability of divergence.

    Args:
        diverged: number of runs of the arm whose runs all diverged.
        finished: number of runs of the arm whose runs all ended finite.
    """
    n, m = diverged, finished
    p: float = n**n * m**m / (n + m) ** (n + m)
    return p
