"""Gaps between two arms, paired by seed or as two independent samples (Welch)."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from diffllm.statistics.intervals import CONFIDENCE, Estimate, t_interval

Seed = TypeVar("Seed", bound=Hashable)

ROUNDING = 1e-12
"""Share of the largest value below which a standard deviation is what rounding left of none."""
FEWEST = 3
"""Common seeds from which on a correlation is given: that of two is always 1 or -1."""


@dataclass(frozen=True)
class Gap:
    """A mean difference, own minus base, and its t test.

    Where seeds do not vary at all, nothing tells chance from effect: the interval is one point and
    every p is 1.
    """

    mean: float
    seeds: int
    """Values of the own arm that it rests on; of a paired gap, the pairs."""
    base_seeds: int
    """Values of the base."""
    error: float | None = None
    """Standard error of the mean; None where an arm has a single value."""
    df: float | None = None
    """Degrees of freedom: pairs - 1, or Welch and Satterthwaite's."""
    zero_variance: bool = False
    """Whether the values vary by no more than rounding."""

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Student's t interval; None without a standard error."""
        if self.error is None or self.df is None:
            return None
        return t_interval(self.mean, self.error, self.df, confidence)

    @property
    def estimate(self) -> Estimate:
        low, high = self.interval() or (None, None)
        return Estimate(self.mean, low, high, self.seeds)

    @property
    def low(self) -> float | None:
        return self.estimate.low

    @property
    def high(self) -> float | None:
        return self.estimate.high

    def p_below(self, bound: float = 0.0) -> float | None:
        """One-sided p of "the gap is below `bound`"; None without a standard error."""
        if self.error is None or self.df is None:
            return None
        if self.zero_variance:
            return 1.0
        from scipy.special import stdtr

        return float(stdtr(self.df, (self.mean - bound) / self.error))

    def p_above(self, bound: float = 0.0) -> float | None:
        """One-sided p of "the gap is above `bound`"; None without a standard error."""
        return replace(self, mean=-self.mean).p_below(-bound)

    @property
    def p(self) -> float | None:
        """Two-sided p of "the gap is not 0"; None without a standard error."""
        below, above = self.p_below(), self.p_above()
        return None if below is None or above is None else min(1.0, 2 * min(below, above))


def paired(own: Mapping[Seed, float], base: Mapping[Seed, float]) -> Gap | None:
    """Mean of own - base over the seeds that both have, with the paired t test.

    Runs of one seed see the same samples in the same order and start from the same initial values,
    whatever their variant. What that draw adds to the loss of both is no part of their difference,
    so the differences of the pairs are the sample. Where seeds do not correlate, pairing gains
    nothing and costs half of the degrees of freedom: `pairing_pays_above`.

    Args:
        own, base: finite losses by seed.

    Returns:
        None where no seed is common.
    """
    first, second = common(own, base)
    if not len(first):
        return None
    differences, n = first - second, len(first)
    mean = float(differences.mean())
    if n == 1:
        return Gap(mean, 1, 1)
    deviation = float(differences.std(ddof=1))
    none = deviation <= ROUNDING * largest(first, second)
    return Gap(mean, n, n, deviation / float(np.sqrt(n)), n - 1, none)


def welch(own: Mapping[Seed, float], base: Mapping[Seed, float]) -> Gap | None:
    """Difference of the means of two independent samples, with Welch's t test.

    Args:
        own, base: finite losses by seed; each arm's seeds count, common or not.

    Returns:
        None where an arm has no value.
    """
    first, second = arrays(own), arrays(base)
    sizes = len(first), len(second)
    if not all(sizes):
        return None
    mean = float(first.mean() - second.mean())
    if min(sizes) == 1:
        return Gap(mean, *sizes)
    deviations = [float(sample.std(ddof=1)) for sample in (first, second)]
    if max(deviations) <= ROUNDING * largest(first, second):
        return Gap(mean, *sizes, 0.0, sum(sizes) - 2, zero_variance=True)
    unit = max(deviations)  # so that no square underflows
    shares = [(d / unit) ** 2 / n for d, n in zip(deviations, sizes, strict=True)]
    df = sum(shares) ** 2 / sum(s**2 / (n - 1) for s, n in zip(shares, sizes, strict=True))
    return Gap(mean, *sizes, unit * math.sqrt(sum(shares)), df)


def seed_correlation(own: Mapping[Seed, float], base: Mapping[Seed, float]) -> float | None:
    """Pearson's correlation of two arms over common seeds; None from fewer than three of them, or
    where an arm does not vary."""
    first, second = common(own, base)
    if len(first) < FEWEST:
        return None
    if any(x.std(ddof=1) <= ROUNDING * largest(first, second) for x in (first, second)):
        return None
    return float(np.corrcoef(first, second)[0, 1])


def pairing_pays_above(seeds: int) -> float:
    """The correlation from which on a paired interval is narrower than one of two samples.

    Half widths are t(n - 1) s sqrt(2 (1 - r) / n) and t(2n - 2) s sqrt(2 / n).
    """
    from scipy.special import stdtrit

    paired, unpaired = (float(stdtrit(df, 0.975)) for df in (seeds - 1, 2 * seeds - 2))
    return 1 - (unpaired / paired) ** 2


def common(own: Mapping[Seed, float], base: Mapping[Seed, float]) -> tuple[np.ndarray, np.ndarray]:
    """The values of both over the seeds that both have, in one order."""
    seeds = [seed for seed in own if seed in base]
    return arrays({seed: own[seed] for seed in seeds}), arrays({s: base[s] for s in seeds})


def arrays(values: Mapping[Seed, float]) -> np.ndarray:
    """The values in order of their seeds, float64; raises ValueError for one that is not finite."""
    found = np.array([values[seed] for seed in sorted(values)], dtype=np.float64)  # type: ignore[type-var]
    if not np.isfinite(found).all():
        raise ValueError("a loss that is not finite is a run that diverged; see outcomes.py")
    return found


def largest(*samples: np.ndarray) -> float:
    return float(max(np.abs(sample).max() for sample in samples))
