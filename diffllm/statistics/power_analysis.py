"""Power of t tests of a gap, and the number of seeds that reaches a given power."""

import math
from collections.abc import Callable

import numpy as np

from diffllm.statistics.gap_tests import ALPHA

MOST_SEEDS = 100_000
SLICES = 64
CERTAIN = 30.0
"""Noncentrality beyond the critical value from which a test is certain to find a gap."""
FAR = 4.5
"""Noncentrality from which no gap is found with the wrong sign (less than one in 100,000), and
scipy's value for it can be NaN."""


def welch_power(gap: float, sd: float, seeds: int, alpha: float = ALPHA, sides: int = 2) -> float:
    """Return the probability that Welch's test of two samples of equal size and spread finds a gap.

    Its t is Student's with 2n - 2 degrees of freedom, but its critical value uses the smaller
    estimate (n - 1) / (r^2 + (1 - r)^2), where r is the first arm's share of both variances. This
    is a mean over r, which has a Beta((n - 1) / 2, (n - 1) / 2) distribution independent of t.

    `gap` is the true difference of means, `sd` the deviation between the `seeds` (n) of an arm.
    """
    from scipy.special import betaincinv

    shape = (seeds - 1) / 2
    r = betaincinv(shape, shape, (np.arange(SLICES) + 0.5) / SLICES)
    judged_by = (seeds - 1) / (r**2 + (1 - r) ** 2)
    return t_power(abs(gap) / (sd * math.sqrt(2 / seeds)), 2 * seeds - 2, judged_by, alpha, sides)


def paired_power(gap: float, sd: float, seeds: int, alpha: float = ALPHA, sides: int = 2) -> float:
    """Return the power of a paired t test; `sd` is that of the differences of pairs."""
    df = seeds - 1
    return t_power(abs(gap) / (sd / math.sqrt(seeds)), df, np.array([df]), alpha, sides)


def t_power(
    noncentrality: float, df: float, judged_by: np.ndarray, alpha: float, sides: int
) -> float:
    """Return the probability that a noncentral t with `df` passes the critical value.

    The result is the mean over `judged_by`, the degrees of freedom of the critical value.
    """
    from scipy.special import nctdtr, stdtrit

    critical = stdtrit(judged_by, 1 - alpha / sides)
    if noncentrality > CERTAIN + critical.max():
        return 1.0
    found = 1 - nctdtr(df, noncentrality, critical)
    if sides == 2 and noncentrality < FAR:
        found += nctdtr(df, noncentrality, -critical)
    return float(found.mean())


def pairing_pays_above(seeds: int) -> float:
    """Return the correlation above which a paired interval is narrower than an unpaired one."""
    from scipy.special import stdtrit

    paired, unpaired = (float(stdtrit(df, 0.975)) for df in (seeds - 1, 2 * seeds - 2))
    return 1 - (unpaired / paired) ** 2


def least_seeds(power: Callable[[int], float], wanted: float) -> int | None:
    """Return the fewest seeds, two or more, whose power reaches `wanted`; None above MOST_SEEDS."""
    low, high = 1, 2
    while power(high) < wanted:
        low, high = high, 2 * high
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= wanted else (middle, high)
    return high
