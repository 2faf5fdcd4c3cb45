"""t tests of the gap between the runs of two variants: paired by seed, or Welch's test."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from diffllm.statistics.estimates import CONFIDENCE, ROUNDING, Estimate, t_interval

Seed = TypeVar("Seed", bound=Hashable)

ALPHA = 0.05
"""Probability that a family of tests without true differences shows at least one difference."""
MOST_ALPHA = 0.1
"""Largest accepted alpha."""
FEWEST_FOR_CORRELATION = 3
"""Fewest common seeds for a correlation. With two seeds a correlation is always 1 or -1."""


@dataclass(frozen=True)
class Gap:
    """Mean of a variant minus mean of its baseline, with the standard error for a t test.

    `seeds` runs of the variant and `base_seeds` runs of the baseline were averaged. `error` is the
    standard error of the difference `mean`, and `df` are the degrees of freedom of `error`. Both
    are None if one of the two averages has only one run. `zero_variance` is True if the values, or
    the paired differences, do not vary between seeds. No t test is then possible; p-values are 1.
    `document_error` is the part of `error` that comes from the choice of documents; None if `error`
    omits this part.
    """

    mean: float
    seeds: int
    base_seeds: int
    error: float | None = None
    df: float | None = None
    zero_variance: bool = False
    document_error: float | None = None

    def with_document_error(self, document_error: float) -> "Gap":
        """Return the gap with an error that includes the error over documents.

        Seeds share the documents, so the error over seeds does not contain this part. The degrees
        of freedom remain those of the seeds, which makes wide bounds wider, never narrower. Raises
        ValueError if `error` is None.
        """
        if self.error is None:
            raise ValueError("a gap of a single seed has no error")
        error = math.hypot(self.error, document_error)
        return replace(self, error=error, document_error=document_error)

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Return the (low, high) t confidence interval of the gap, or None if `error` is None."""
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
        """Return the p-value of the alternative gap < `bound`, or None if `error` is None."""
        if self.error is None or self.df is None:
            return None
        if self.zero_variance:
            return 1.0
        from scipy.special import stdtr

        t = (self.mean - bound) / self.error
        return float(stdtr(self.df, t))

    def p_above(self, bound: float = 0.0) -> float | None:
        """Return the p-value of the alternative gap > `bound`, or None if `error` is None."""
        mirrored = replace(self, mean=-self.mean)
        return mirrored.p_below(-bound)

    @property
    def p(self) -> float | None:
        """Two-sided p-value of the null hypothesis "the gap is 0", or None if `error` is None."""
        below = self.p_below()
        above = self.p_above()
        if below is None or above is None:
            return None
        # With zero variance both one-sided p-values are 1, so the product must be limited.
        return min(1.0, 2 * min(below, above))


def paired(candidate: Mapping[Seed, float], base: Mapping[Seed, float]) -> Gap | None:
    """Return the mean of `candidate` - `base` over their common seeds, for a paired t test.

    Return None if no seed is in both. Two runs with the same seed have the same data order and
    initial parameters. The effects of both therefore cancel in the difference.

    Args:
        candidate, base: value of each run by seed, such as the final loss.
    """
    first, second = common_seeds(candidate, base)
    n = len(first)
    if n == 0:
        return None
    differences = first - second
    mean = float(differences.mean())
    if n == 1:
        return Gap(mean, 1, 1)
    df = n - 1
    deviation = float(differences.std(ddof=1))
    # Differences of equal losses are rounding errors of the losses, so compare with the losses.
    floor = ROUNDING * largest_magnitude(first, second)
    if deviation <= floor:
        return Gap(mean, n, n, 0.0, df, zero_variance=True)
    error = deviation / float(np.sqrt(n))
    return Gap(mean, n, n, error, df)


def welch(candidate: Mapping[Seed, float], base: Mapping[Seed, float]) -> Gap | None:
    """Return the mean of `candidate` minus the mean of `base`, for Welch's t test.

    The test treats the samples as independent. Return None if `candidate` or `base` is empty.
    """
    first = in_seed_order(candidate)
    second = in_seed_order(base)
    n = len(first)
    m = len(second)
    if n == 0 or m == 0:
        return None
    mean = float(first.mean() - second.mean())
    if min(n, m) == 1:
        return Gap(mean, n, m)
    first_sd = float(first.std(ddof=1))
    second_sd = float(second.std(ddof=1))
    # Squares of tiny deviations underflow (also in scipy's ttest_ind), so scale the deviations.
    unit = max(first_sd, second_sd)
    floor = ROUNDING * largest_magnitude(first, second)
    if unit <= floor:
        return Gap(mean, n, m, 0.0, n + m - 2, zero_variance=True)
    first_part = (first_sd / unit) ** 2 / n
    second_part = (second_sd / unit) ** 2 / m
    variance = first_part + second_part
    # Welch-Satterthwaite degrees of freedom.
    divisor = first_part**2 / (n - 1) + second_part**2 / (m - 1)
    df = variance**2 / divisor
    error = unit * math.sqrt(variance)
    return Gap(mean, n, m, error, df)


def seed_correlation(candidate: Mapping[Seed, float], base: Mapping[Seed, float]) -> float | None:
    """Return Pearson's correlation of `candidate` and `base` over their common seeds.

    Return None with fewer than FEWEST_FOR_CORRELATION common seeds, or if all values of one variant
    are equal.
    """
    first, second = common_seeds(candidate, base)
    if len(first) < FEWEST_FOR_CORRELATION:
        return None
    # The correlation with equal values would divide by 0, or by a rounding error.
    floor = ROUNDING * largest_magnitude(first, second)
    smaller_sd = min(first.std(ddof=1), second.std(ddof=1))
    if smaller_sd <= floor:
        return None
    correlations = np.corrcoef(first, second)  # (2, 2)
    return float(correlations[0, 1])


@dataclass(frozen=True)
class Equivalence:
    """Result of two one-sided tests of whether a gap is within ±margin (Schuirmann, 1987).

    The null hypothesis is a gap outside of ±margin. `p` is the larger of the two p-values. `low`
    and `high` are the ends of the confidence interval of the gap at level 1 - 2 alpha, where alpha
    is the level of each test. `inside` states whether this interval is within ±margin.
    """

    p: float
    low: float
    high: float
    inside: bool


def equivalence(gap: Gap, margin: float, alpha: float = ALPHA) -> Equivalence | None:
    """Test by two one-sided t tests at level `alpha` whether a gap is within ±margin.

    Return None if `gap` has no standard error. Raises ValueError unless `margin` is above 0.
    """
    if not margin > 0:
        raise ValueError(f"margin={margin} must be above 0")
    below = gap.p_below(margin)
    above = gap.p_above(-margin)
    # The interval at this level is within ±margin if and only if both tests are significant.
    interval = gap.interval(1 - 2 * alpha)
    if interval is None or below is None or above is None:
        return None
    low, high = interval
    is_inside = -margin < low and high < margin
    return Equivalence(max(below, above), low, high, is_inside)


def holm(p: Sequence[float | None]) -> list[float | None]:
    """Return the p-values `p` of several tests after Holm's correction (1979), in the order of `p`.

    The smallest of m p-values is multiplied by m, the second smallest by m - 1, and so on; the
    largest is multiplied by 1. A product below the product of a smaller p-value is raised to that
    product. All results are limited to 1. None, for a missing test, remains None.
    """
    values = np.array([x for x in p if x is not None], dtype=np.float64)
    order = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)
    products = values[order] * factors
    running_maximum = np.maximum.accumulate(products)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(running_maximum, 1)
    remaining = iter(adjusted.tolist())
    return [None if x is None else next(remaining) for x in p]


def common_seeds(
    candidate: Mapping[Seed, float], base: Mapping[Seed, float]
) -> tuple[np.ndarray, np.ndarray]:
    candidate_values = {}
    base_values = {}
    for seed, value in candidate.items():
        if seed in base:
            candidate_values[seed] = value
            base_values[seed] = base[seed]
    return in_seed_order(candidate_values), in_seed_order(base_values)


def in_seed_order(values: Mapping[Seed, float]) -> np.ndarray:
    """Return the values as float64, sorted by seed; raise ValueError unless all are finite."""
    seeds = sorted(values)  # type: ignore[type-var]
    ordered = np.array([values[seed] for seed in seeds], dtype=np.float64)
    if not np.isfinite(ordered).all():
        raise ValueError("a loss is not finite; use arm_gap for arms with diverged runs")
    return ordered


def largest_magnitude(*samples: np.ndarray) -> float:
    magnitudes = [np.abs(sample).max() for sample in samples]
    return float(max(magnitudes))
