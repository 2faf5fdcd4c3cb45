"""Power of t tests of the gap between two variants, and the number of seeds for a given power."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from diffllm.statistics.gap_tests import ALPHA
from diffllm.statistics.seed_variance import SeedSpread

MOST_SEEDS = 100_000
SLICES = 64
CERTAIN = 30.0
"""If the noncentrality exceeds the critical value by this much, the power is 1."""
FAR = 4.5
"""From this noncentrality the probability of a gap of the wrong sign is ignored. The probability is
below 1e-5, and scipy's value can be NaN."""


def welch_power(gap: float, sd: float, seeds: int, alpha: float = ALPHA, sides: int = 2) -> float:
    """Return the power of Welch's t test at level `alpha` for two samples of equal size.

    Args:
        gap: true difference of the means.
        sd: standard deviation between the seeds of one sample, equal for both samples.
        seeds: number of seeds per sample.
        sides: 1 or 2, for a one-sided or a two-sided test.
    """
    noncentrality = abs(gap) / (sd * math.sqrt(2 / seeds))
    return t_power(noncentrality, 2 * seeds - 2, welch_df(seeds), alpha, sides)


def paired_power(gap: float, sd: float, seeds: int, alpha: float = ALPHA, sides: int = 2) -> float:
    """Return the power of a paired t test at level `alpha`.

    Args:
        gap: true mean of the paired differences.
        sd: standard deviation of the paired differences.
        seeds: number of paired differences.
        sides: 1 or 2, for a one-sided or a two-sided test.
    """
    df = seeds - 1
    return t_power(abs(gap) / (sd / math.sqrt(seeds)), df, np.array([df]), alpha, sides)


def welch_df(seeds: int) -> np.ndarray:
    """Return SLICES equally probable values (SLICES,) of the degrees of freedom in Welch's test.

    Welch's test estimates its degrees of freedom from the two sample variances, so the estimate is
    random. Both samples have `seeds` values and the same true variance.
    """
    from scipy.special import betaincinv

    # r, the first sample's share of the sum of both variances, has a beta distribution and is
    # independent of the t statistic, which has 2 * seeds - 2 degrees of freedom.
    shape = (seeds - 1) / 2
    r = betaincinv(shape, shape, slice_midpoints())
    return (seeds - 1) / (r**2 + (1 - r) ** 2)


def slice_midpoints() -> np.ndarray:
    return (np.arange(SLICES) + 0.5) / SLICES


def t_power(
    noncentrality: float, df: float, critical_dfs: np.ndarray, alpha: float, sides: int
) -> float:
    """Return the power of a t test: the probability of a significant result.

    Args:
        noncentrality: true gap divided by the true standard error of the gap.
        df: degrees of freedom of the t statistic.
        critical_dfs: (n,), equally probable degrees of freedom for the critical value, as from
            `welch_df`. The power is averaged over these values.
    """
    from scipy.special import nctdtr, stdtrit

    critical = stdtrit(critical_dfs, 1 - alpha / sides)
    if noncentrality > CERTAIN + critical.max():
        return 1.0
    found = 1 - nctdtr(df, noncentrality, critical)
    if sides == 2 and noncentrality < FAR:
        found += nctdtr(df, noncentrality, -critical)
    return float(found.mean())


def pairing_pays_above(seeds: int) -> float:
    """Return the correlation over seeds above which pairing narrows the 95% interval of a gap."""
    from scipy.special import stdtrit

    paired, unpaired = (float(stdtrit(df, 0.975)) for df in (seeds - 1, 2 * seeds - 2))
    return 1 - (unpaired / paired) ** 2


def least_seeds(power: Callable[[int], float], wanted: float) -> int | None:
    """Return the fewest seeds, at least 2, that give the power `wanted`.

    Return None if 2^k seeds are not enough, for the largest 2^k that is at most MOST_SEEDS.

    Args:
        power: returns the power for a number of seeds; must not decrease with more seeds.
    """
    low, high = 1, 2
    while power(high) < wanted:
        low, high = high, 2 * high
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= wanted else (middle, high)
    return high


def chance_of_less(
    power: Callable[[float, int], float],
    pilot: SeedSpread,
    scale: float,
    wanted: float,
    less: float,
) -> float | None:
    """Return the probability that the true power of a study planned from a pilot is below `less`.

    The pilot yields a random estimate of the standard deviation between seeds. The study then has
    the number of seeds that would give the power `wanted` if the true standard deviation were
    `scale` times this estimate. Return None if `least_seeds` finds no number of seeds for the power
    `less`.

    Args:
        power: returns the power for a standard deviation and a number of seeds.
        pilot: true standard deviation `sd`, and degrees of freedom `df` of the estimate.
    """
    from scipy.special import chdtr

    enough = least_seeds(partial(power, pilot.sd), less)
    if enough is None:
        return None
    if enough == 2:
        return 0.0
    # All estimates below a threshold lead to too few seeds. The square of an estimate has a
    # chi-square distribution.
    largest = largest_sd(lambda sd: power(sd, enough - 1), wanted, pilot.sd)
    return float(chdtr(pilot.df, pilot.df * (largest / (scale * pilot.sd)) ** 2))


def largest_sd(power: Callable[[float], float], wanted: float, start: float) -> float:
    """Return the standard deviation at which a test has the power `wanted`.

    Args:
        power: returns the power for a standard deviation; must be a decreasing function.
        start: first guess of the result.
    """
    from scipy.optimize import brentq

    def excess(doublings: float) -> float:
        return power(start * 2.0**doublings) - wanted

    low = high = 0
    while excess(low) < 0:
        low -= 1
    while excess(high) >= 0:
        high += 1
    return start * 2.0 ** float(brentq(excess, low, high))
