"""Power of t tests of a gap, and the number of seeds that reaches a given power."""

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
    """Return the probability that Welch's t test finds a gap between two samples of equal size.

    Both samples have the same true variance. The test statistic is Student's t with 2n - 2 degrees
    of freedom. The critical value uses the smaller estimate (n - 1) / (r^2 + (1 - r)^2), where r is
    the first sample's share of the sum of both variances. The power is a mean over r, which has a
    Beta((n - 1) / 2, (n - 1) / 2) distribution independent of t.

    Args:
        gap: true difference of means.
        sd: standard deviation between the seeds of one sample.
        seeds: number n of seeds per sample.
        alpha: significance level.
        sides: 1 or 2, for a one-sided or a two-sided test.
    """
    noncentrality = abs(gap) / (sd * math.sqrt(2 / seeds))
    return t_power(noncentrality, 2 * seeds - 2, welch_df(seeds), alpha, sides)


def paired_power(gap: float, sd: float, seeds: int, alpha: float = ALPHA, sides: int = 2) -> float:
    """Return the probability that a paired t test finds a gap.

    Args:
        gap: true mean of the paired differences.
        sd: standard deviation of the paired differences.
        seeds: number of pairs.
    """
    df = seeds - 1
    return t_power(abs(gap) / (sd / math.sqrt(seeds)), df, np.array([df]), alpha, sides)


def welch_df(seeds: int) -> np.ndarray:
    """Return equally likely degrees of freedom of Welch's test of two samples, (SLICES,).

    Both samples have `seeds` values and the same true variance; see `welch_power`.
    """
    from scipy.special import betaincinv

    shape = (seeds - 1) / 2
    r = betaincinv(shape, shape, slices())
    return (seeds - 1) / (r**2 + (1 - r) ** 2)


def slices() -> np.ndarray:
    """Return the middle probability of each of SLICES equally likely parts of a distribution."""
    return (np.arange(SLICES) + 0.5) / SLICES


def t_power(
    noncentrality: float, df: float, judged_by: np.ndarray, alpha: float, sides: int
) -> float:
    """Return the probability that a noncentral t statistic exceeds the critical value of a t test.

    Args:
        noncentrality: true gap, in standard errors.
        df: degrees of freedom of the statistic.
        judged_by: degrees of freedom of the critical value; the result is the mean over them.
        sides: 1 or 2, for a one-sided or a two-sided test.
    """
    from scipy.special import nctdtr, stdtrit

    critical = stdtrit(judged_by, 1 - alpha / sides)
    if noncentrality > CERTAIN + critical.max():
        return 1.0
    found = 1 - nctdtr(df, noncentrality, critical)
    if sides == 2 and noncentrality < FAR:
        found += nctdtr(df, noncentrality, -critical)
    return float(found.mean())


def welch_equivalence_power(margin: float, sd: float, seeds: int, alpha: float = ALPHA) -> float:
    """Return the probability that two one-sided Welch tests show equivalence of two equal arms.

    Args:
        margin: largest difference of means that counts as equivalent.
        sd: standard deviation between the seeds of one arm, the runs of one variant.
        seeds: number of seeds per arm.
    """
    margin_in_errors = margin / (sd * math.sqrt(2 / seeds))
    return two_tests_power(margin_in_errors, 2 * seeds - 2, welch_df(seeds), alpha)


def paired_equivalence_power(margin: float, sd: float, seeds: int, alpha: float = ALPHA) -> float:
    """Return the probability that two one-sided paired t tests show equivalence of two equal arms.

    Args:
        margin: largest mean difference that counts as equivalent.
        sd: standard deviation of the paired differences.
        seeds: number of pairs.
    """
    df = seeds - 1
    return two_tests_power(margin / (sd / math.sqrt(seeds)), df, np.array([df]), alpha)


def two_tests_power(
    margin_in_errors: float, df: float, judged_by: np.ndarray, alpha: float
) -> float:
    """Return the probability that two one-sided t tests show equivalence at a true gap of 0.

    The tests show equivalence if the magnitude of the measured gap is below the margin minus the
    critical value times the estimated standard error. The result is a mean over that estimate.

    Args:
        margin_in_errors: margin of equivalence, in true standard errors of the gap.
        df: degrees of freedom of the estimated standard error.
        judged_by: degrees of freedom of the critical value; the result is the mean over them.
    """
    from scipy.special import chdtri, ndtr, stdtrit

    estimated_error = np.sqrt(chdtri(df, slices()) / df)
    room = margin_in_errors - stdtrit(judged_by, 1 - alpha) * estimated_error[:, None]
    return float(np.maximum(0, 2 * ndtr(room) - 1).mean())


def pairing_pays_above(seeds: int) -> float:
    """Return the correlation over seeds above which pairing narrows the interval of a gap."""
    from scipy.special import stdtrit

    paired, unpaired = (float(stdtrit(df, 0.975)) for df in (seeds - 1, 2 * seeds - 2))
    return 1 - (unpaired / paired) ** 2


def least_seeds(power: Callable[[int], float], wanted: float) -> int | None:
    """Return the fewest seeds, at least 2, whose power reaches `wanted`; None above MOST_SEEDS.

    Args:
        power: function of the number of seeds that does not decrease.
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
    """Return the probability that a pilot recommends too few seeds: true power below `less`.

    The pilot estimates the standard deviation between seeds. The pilot recommends the fewest seeds
    with power `wanted` at the estimate times `scale`. This number rises with the estimate, so all
    estimates below a threshold lead to too few seeds. The squared estimate has a chi-square
    distribution.

    Return None if no number of seeds up to MOST_SEEDS has the power `less`.

    Args:
        power: function of a standard deviation and a number of seeds.
        pilot: true standard deviation, and degrees of freedom of the pilot's estimate.
    """
    from scipy.special import chdtr

    enough = least_seeds(partial(power, pilot.sd), less)
    if enough is None:
        return None
    if enough == 2:
        return 0.0
    largest = largest_sd(lambda sd: power(sd, enough - 1), wanted, pilot.sd)
    return float(chdtr(pilot.df, pilot.df * (largest / (scale * pilot.sd)) ** 2))


def largest_sd(power: Callable[[float], float], wanted: float, start: float) -> float:
    """Return the standard deviation at which a test has the power `wanted`.

    Args:
        power: decreasing function of the standard deviation.
        start: standard deviation at which the search starts.
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
