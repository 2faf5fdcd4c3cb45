"""Means over seeds, with Student's t intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with its 95% interval; no interval from a single seed."""

    mean: float
    low: float | None = None
    high: float | None = None
    seeds: int = 1

    @property
    def holds_zero(self) -> bool:
        """Whether the interval holds 0, which of a gap shows no difference."""
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of n independent values and its t interval, mean ± t(n - 1) s / sqrt(n).

    s is the sample standard deviation (n - 1 in the denominator). A single value has no interval;
    no value at all raises ValueError.
    """
    if not len(values):
        raise ValueError("an estimate needs at least one value")
    sample = np.asarray(values, dtype=np.float64)
    n, mean = len(sample), float(sample.mean())
    if n == 1:
        return Estimate(mean)
    low, high = t_interval(mean, float(sample.std(ddof=1) / np.sqrt(n)), n - 1)
    return Estimate(mean, low, high, n)


def t_interval(
    mean: float, error: float, df: float, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """The interval of a mean with that standard error and degrees of freedom."""
    from scipy.special import stdtrit  # a third of a second that a single run does not need

    half = float(stdtrit(df, (1 + confidence) / 2)) * error
    return mean - half, mean + half
