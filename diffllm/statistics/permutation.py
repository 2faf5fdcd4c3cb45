"""Exact one-sided permutation tests: of signs, of labels, and of times until a level is reached.

p is the share of assignments whose statistic is at least as large as the observed statistic. If at
most `DRAWS` assignments exist, all are used. Otherwise `DRAWS` are drawn with a fixed seed, and p
is (1 + count) / (1 + draws), which is valid for any number of draws (Phipson and Smyth, 2010).
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
    """Return p of "the mean is above 0"; under the null hypothesis every sign is random.

    Args:
        differences: (n,), one per pair, minus the bound of the test.
    """
    return share_as_large(np.asarray(differences, np.float64), signs(len(differences)))


def label(own: Array, base: Array) -> float:
    """Return p of "own has the larger mean"; under the null hypothesis the labels are random.

    Args:
        own, base: (n,) and (m,), values of two independent samples.
    """
    values = np.concatenate([own, base]).astype(np.float64)
    return share_as_large(values, chosen(len(own), len(values)))


def log_rank(own: Times, base: Times) -> float | None:
    """Return p of "own reaches the level sooner"; None if no run reaches the level.

    The log-rank statistic, observed minus expected events of `own`, equals the sum of the scores of
    its runs (event minus Nelson-Aalen hazard). Scores do not depend on labels, so they are computed
    once for all assignments.
    """
    if not own.count + base.count or not own.tokens or not base.tokens:
        return None
    tokens = np.array([*own.tokens, *base.tokens], np.float64)
    reached = np.array([*own.reached, *base.reached], bool)
    at_risk = (tokens[None, :] >= tokens[:, None]).sum(axis=1)
    events = np.unique(tokens[reached])
    rates = [reached[tokens == time].sum() / at_risk[tokens == time][0] for time in events]
    hazard = np.append(0.0, np.cumsum(rates))[np.searchsorted(events, tokens, side="right")]
    scores = reached - hazard
    return label(scores[: len(own.tokens)], scores[len(own.tokens) :])


def share_as_large(values: Array, assignments: Array) -> float:
    """Return the share of assignments whose sum is at least the observed sum, which is first."""
    sums = assignments @ values
    enough = sums[0] - ROUNDING * np.abs(values).sum()
    return float((sums >= enough).mean())


@cache
def signs(n: int) -> Array:
    """Return sign assignments (count, n), the observed assignment first."""
    if 2**n <= DRAWS:
        # Bit j of row i is the sign of difference j; row 0 has only positive signs.
        return 1.0 - 2.0 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    drawn = np.random.default_rng(n).integers(0, 2, (DRAWS, n))
    return np.concatenate([np.ones((1, n)), 1.0 - 2.0 * drawn])


@cache
def chosen(n: int, total: int) -> Array:
    """Return choices of n of `total` places as 0 and 1, (count, total).

    The first choice, which is the observed assignment, has the first n places.
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
