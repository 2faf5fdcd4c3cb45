"""Exact one-sided permutation tests: sign flips, label permutations, and the log-rank test.

A permutation changes signs of paired differences, or exchanges runs between two samples. The
p-value is the share of permutations whose statistic is at least as large as the observed statistic.
Up to `DRAWS` permutations are enumerated. Otherwise `DRAWS` permutations are drawn with a fixed
seed, and the p-value is (1 + count) / (1 + draws), which is valid for any number of draws (Phipson
and Smyth, 2010).
"""

import math
from functools import cache
from itertools import combinations

import numpy as np

from diffllm.statistics.estimates import Times

DRAWS = 20_000
ROUNDING = 1e-9
"""Sums that differ by less than this share of the largest sum count as equal."""

Array = np.ndarray


def sign_flip(differences: Array) -> float:
    """Return the p-value of the alternative "the mean is above 0", by random signs of differences.

    Args:
        differences: (n,), own minus base for each seed. To test against a bound other than 0,
            subtract the bound first.
    """
    return share_as_large(np.asarray(differences, np.float64), signs(len(differences)))


def label(own: Array, base: Array) -> float:
    """Return the p-value of the alternative "`own` has the larger mean", by exchange of values.

    Args:
        own, base: (n,) and (m,), values of two independent samples.
    """
    values = np.concatenate([own, base]).astype(np.float64)
    return share_as_large(values, chosen(len(own), len(values)))


def log_rank(own: Times, base: Times) -> float | None:
    """Return the p-value of "runs of `own` reach the target loss after fewer tokens than `base`".

    Return None if no run reaches the target loss, or if `own` or `base` contains no run.
    """
    if not own.count + base.count or not own.tokens or not base.tokens:
        return None
    tokens = np.array([*own.tokens, *base.tokens], np.float64)
    reached = np.array([*own.reached, *base.reached], bool)
    at_risk = (tokens[None, :] >= tokens[:, None]).sum(axis=1)
    events = np.unique(tokens[reached])
    rates = [reached[tokens == time].sum() / at_risk[tokens == time][0] for time in events]
    hazard = np.append(0.0, np.cumsum(rates))[np.searchsorted(events, tokens, side="right")]
    # The log-rank statistic is the sum of these scores over `own`; scores depend on no labels.
    scores = reached - hazard
    return label(scores[: len(own.tokens)], scores[len(own.tokens) :])


def share_as_large(values: Array, assignments: Array) -> float:
    """Return the share of weighted sums of `values` that are at least as large as the first sum.

    Args:
        assignments: (count, n), weights of the n values in each sum. Row 0 gives the observed sum.
    """
    sums = assignments @ values
    enough = sums[0] - ROUNDING * np.abs(values).sum()
    return float((sums >= enough).mean())


@cache
def signs(n: int) -> Array:
    """Return combinations of signs for n values as 1 and -1, (count, n); row 0 contains only 1.

    Return all 2^n combinations if these are at most DRAWS, otherwise random combinations.
    """
    if 2**n <= DRAWS:
        # Bit j of row i is the sign of difference j; row 0 has only positive signs.
        return 1.0 - 2.0 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    drawn = np.random.default_rng(n).integers(0, 2, (DRAWS, n))
    return np.concatenate([np.ones((1, n)), 1.0 - 2.0 * drawn])


@cache
def chosen(n: int, total: int) -> Array:
    """Return choices of n of `total` values, (count, total): 1 for a chosen value, otherwise 0.

    Row 0 chooses the first n values. Return all choices if these are at most DRAWS, otherwise
    random choices.
    """
    if math.comb(total, n) <= DRAWS:
        places = np.array([*combinations(range(total), n)])
    else:
        rng = np.random.default_rng((n, total))
        drawn = rng.permuted(np.tile(np.arange(total), (DRAWS, 1)), axis=1)[:, :n]
        places = np.concatenate([np.arange(n)[None], drawn])
    found = np.zeros((len(places), total))
    np.put_along_axis(found, places, 1.0, axis=1)
    return found
