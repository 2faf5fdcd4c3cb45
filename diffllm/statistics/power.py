"""The power of t tests of a gap, and how many seeds reach one."""

from collections.abc import Callable

import numpy as np

from diffllm.statistics.families import ALPHA

MOST_SEEDS = 100_000
"""More are not looked for."""
CERTAIN = 30.0
"""Noncentrality from which on a test is sure to find a gap, and scipy's series may not end."""


def unpaired_power(
    gap: float, sd: float, seeds: int, alpha: float = ALPHA, sides: int = 2
) -> float:
    """Probability that a t test of two independent samples finds a gap.

    Args:
        gap: the true difference of means.
        sd: standard deviation between seeds within an arm.
        seeds: of each arm, two or more.
        sides: 2 where a gap of either sign counts, 1 where its sign was said before.
    """
    return t_power(abs(gap) / (sd * np.sqrt(2 / seeds)), 2 * seeds - 2, alpha, sides)


def paired_power(gap: float, sd: float, seeds: int, alpha: float = ALPHA, sides: int = 2) -> float:
    """Probability that a paired t test finds a gap.

    Args:
        sd: standard deviation of the differences of pairs.
    """
    return t_power(abs(gap) / (sd / np.sqrt(seeds)), seeds - 1, alpha, sides)


def t_power(noncentrality: float, df: float, alpha: float, sides: int) -> float:
    """Probability that a noncentral t passes the critical value."""
    from scipy.special import nctdtr, stdtrit

    critical = float(stdtrit(df, 1 - alpha / sides))
    if noncentrality > CERTAIN + critical:
        return 1.0
    found = 1 - float(nctdtr(df, noncentrality, critical))
    if sides == 2:
        found += float(nctdtr(df, noncentrality, -critical))
    return found


def least_seeds(power: Callable[[int], float], wanted: float) -> int | None:
    """The fewest seeds, two or more, with which `power` reaches `wanted`; None beyond a limit.

    Args:
        power: of so many seeds; rises with them.
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
