"""Estimates over the runs of one variant: mean, rate of events, tokens until a target loss."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

CONFIDENCE = 0.95
ROUNDING = 1e-12
"""Share of the largest value below which a standard deviation counts as rounding error."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% confidence interval, from `low` to `high`.

    `low` and `high` are None for a single seed. `uninformative` is True if the interval contains
    every possible value, such as 0 to 1 for an accuracy.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    seeds: int = 1
    uninformative: bool = False

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def all_equal(self) -> bool:
        """Whether all seeds have the same value, so that the interval has no width."""
        return self.low is not None and self.low == self.high

    def within(self, low: float, high: float) -> "Estimate":
        """Return a copy with the interval cut to the possible values, from `low` to `high`.

        The coverage does not change, because the true value is a possible value.
        """
        if self.low is None or self.high is None:
            return self
        cut_low = max(low, self.low)
        cut_high = min(high, self.high)
        is_uninformative = (cut_low, cut_high) == (low, high)
        return replace(self, low=cut_low, high=cut_high, uninformative=is_uninformative)

    @property
    def holds_zero(self) -> bool:
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values, and its 95% interval by Student's t distribution.

    A single value has no interval. Raises ValueError for an empty sequence.
    """
    if not len(values):
        raise ValueError("an estimate needs at least one value")
    sample = np.asarray(values, dtype=np.float64)
    n = len(sample)
    mean = float(sample.mean())
    if n == 1:
        return Estimate(mean)
    deviation = float(sample.std(ddof=1))
    # The mean of equal values can differ from them in the last bit.
    if deviation <= ROUNDING * float(np.abs(sample).max()):
        deviation = 0.0
    low, high = t_interval(mean, deviation / math.sqrt(n), n - 1)
    return Estimate(mean, low, high, n)


def wilson(share: float, examples: float) -> tuple[float, float]:
    """Return Wilson's 95% confidence interval (JASA 22, 1927) of a share, such as an accuracy.

    Args:
        share: measured share of the examples, in [0, 1].
        examples: number of independent examples.
    """
    from scipy.special import ndtri

    z2 = float(ndtri((1 + CONFIDENCE) / 2)) ** 2 / examples
    centre = share + z2 / 2
    half = math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    low = (centre - half) / (1 + z2)
    high = (centre + half) / (1 + z2)
    # Rounding can move an end beyond 0 or 1.
    return max(0.0, low), min(1.0, high)


def t_interval(
    mean: float, standard_error: float, df: float, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Return the lower and the upper end of Student's t confidence interval of a mean."""
    from scipy.special import stdtrit  # slow to import, and not needed for a single run

    half = float(stdtrit(df, (1 + confidence) / 2)) * standard_error
    return mean - half, mean + half


@dataclass(frozen=True)
class Rate:
    """Rate of rare events, such as loss spikes: `count` events in `steps` >= 1 training steps."""

    count: int
    steps: int

    @property
    def value(self) -> float:
        return 1000 * self.count / self.steps

    @property
    def low(self) -> float:
        """Lower end of the exact 95% Poisson interval (Garwood, 1936) of events per 1000 steps."""
        from scipy.special import gammaincinv

        low = float(gammaincinv(self.count, (1 - CONFIDENCE) / 2)) if self.count else 0.0
        return 1000 * low / self.steps

    @property
    def high(self) -> float:
        from scipy.special import gammaincinv

        return 1000 * float(gammaincinv(self.count + 1, (1 + CONFIDENCE) / 2)) / self.steps


@dataclass(frozen=True)
class Times:
    """Number of training tokens that each run needed to reach a target loss."""

    tokens: Sequence[float]
    """Tokens of each run until the target loss, or until the end of a run that missed it."""
    reached: Sequence[bool]
    """Whether each run reached the target loss."""

    @classmethod
    def of(cls, runs: Iterable[tuple[float, bool]]) -> "Times":
        tokens = []
        reached = []
        for run_tokens, has_reached in runs:
            tokens.append(run_tokens)
            reached.append(has_reached)
        return cls(tokens, reached)

    @property
    def count(self) -> int:
        return sum(self.reached)

    @property
    def censored(self) -> Any:
        from scipy.stats import CensoredData

        return CensoredData.right_censored(self.tokens, ~np.array(self.reached, dtype=bool))

    @property
    def median(self) -> float | None:
        """Kaplan-Meier estimate of the median number of tokens until a run reaches the target loss.

        None if the estimated share of runs that ever reach this loss is below one half.
        """
        if not self.count:
            return None
        from scipy.stats import ecdf

        survival = ecdf(self.censored).sf
        # The tolerance includes a survival function that is 0.5 except for rounding.
        at_most_half = survival.quantiles[survival.probabilities <= 0.5 + 1e-12]
        return float(at_most_half[0]) if len(at_most_half) else None
