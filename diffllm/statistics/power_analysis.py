"""Power of paired t tests of the gap between two arms, and the number of seeds for a power."""

import math
from collections.abc import Callable
from functools import partial

from diffllm.statistics.gap_tests import ALPHA
from diffllm.statistics.seed_variance import SeedSpread

MOST_SEEDS = 100_000
CERTAIN = 30.0
"""If the noncentrality exceeds the critical value by this much, the power is 1."""
FAR = 4.5
"""From this noncentrality the probability of a gap of the wrong sign is ignored. The probability is
below 1e-5, and scipy's value can be NaN."""


def paired_power(gap: float, sd: float, seeds: int, alpha: float = ALPHA, sides: int = 2) -> float:
    """Return the power of a paired t test at level `alpha`.

    Args:
        gap: true mean of the paired differences.
        sd: standard deviation of the paired differences.
        seeds: number of paired differences.
        sides: 1 or 2, for a one-sided or a two-sided test.
    """
    from scipy.special import nctdtr, stdtrit

    # The gap in units of its standard error: the noncentrality of the t distribution.
    df = seeds - 1
    noncentrality = abs(gap) / (sd / math.sqrt(seeds))
    critical = stdtrit(df, 1 - alpha / sides)
    if noncentrality > CERTAIN + critical:
        return 1.0
    power = 1 - nctdtr(df, noncentrality, critical)
    if sides == 2 and noncentrality < FAR:
        power += nctdtr(df, noncentrality, -critical)
    return float(power)


def least_seeds(power: Callable[[int], float], goal: float) -> int | None:
    """Return the fewest seeds, at least 2, that give the power `goal`.

    Return None if 2^k seeds are not enough, for the largest 2^k that is at most MOST_SEEDS.

    Args:
        power: returns the power for a number of seeds; must not decrease with more seeds.
    """
    low, high = 1, 2
    while power(high) < goal:
        low, high = high, 2 * high
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if power(middle) >= goal:
            high = middle
        else:
            low = middle
    return high


def chance_of_less(
    power: Callable[[float, int], float],
    pilot: SeedSpread,
    scale: float,
    goal: float,
    less: float,
) -> float | None:
    """Return the probability that the true power of a study planned from a pilot is below `less`.

    The pilot yields a random estimate of the standard deviation between seeds. The study then has
    the number of seeds that would give the power `goal` if the true standard deviation were
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
    largest = largest_sd(lambda sd: power(sd, enough - 1), goal, pilot.sd)
    return float(chdtr(pilot.df, pilot.df * (largest / (scale * pilot.sd)) ** 2))


def largest_sd(power: Callable[[float], float], goal: float, start: float) -> float:
    """Return the standard deviation at which a test has the power `goal`.

    Args:
        power: returns the power for a standard deviation; must be a decreasing function.
        start: first guess of the result.
    """
    from scipy.optimize import brentq

    # Search over the logarithm, because the scale of the losses is unknown.
    def excess(doublings: float) -> float:
        return power(start * 2.0**doublings) - goal

    low = high = 0
    while excess(low) < 0:
        low -= 1
    while excess(high) >= 0:
        high += 1
    return start * 2.0 ** float(brentq(excess, low, high))
