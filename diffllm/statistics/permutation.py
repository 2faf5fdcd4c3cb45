"""Exact one-sided permutation tests: sign flips, label permutations, and the log-rank test.

A permutation changes signs of paired differences, or exchanges runs between two samples. The
p-value is the share of permutations whose statistic is at least as large as the observed statistic.
If at most `DRAWS` permutations exist, all are enumerated. Otherwise `DRAWS` random permutations are
drawn with a fixed seed. Their p-value is (1 + count) / (1 + DRAWS), where count is the number of
draws with a statistic at least as large as the observed one (Phipson and Smyth, 2010).
"""

import math
from functools import cache
from itertools import combinations

import numpy as np

from diffllm.statistics.estimates import Times

DRAWS = 20_000
SUM_ROUNDING = 1e-9
"""Sums that differ by less than this share of the largest sum count as equal."""

Array = np.ndarray


def sign_flip(differences: Array) -> float:
    """Return the p-value of a sign-flip test for "the mean of `differences` is above 0".

    Args:
        differences: (n,), variant minus baseline for each seed. To test whether the mean is above
            another bound, subtract the bound first.
    """
    return share_as_large(np.asarray(differences, np.float64), signs(len(differences)))


def label(candidate: Array, base: Array) -> float:
    """Return the p-value of a label-permutation test for "`candidate` has the larger mean".

    Args:
        candidate, base: (n,) and (m,), values of two independent samples.
    """
    values = np.concatenate([candidate, base]).astype(np.float64)
    return share_as_large(values, chosen(len(candidate), len(values)))


def log_rank(candidate: Times, base: Times) -> float | None:
    """Return the log-rank p-value that `candidate` needs fewer tokens to a loss than `base`.

    Return None if no run reaches the target loss, or if `candidate` or `base` contains no run.
    """
    if not candidate.count + base.count or not candidate.tokens or not base.tokens:
        return None
    tokens = np.array([*candidate.tokens, *base.tokens], np.float64)
    reached = np.array([*candidate.reached, *base.reached], bool)
    at_risk = (tokens[None, :] >= tokens[:, None]).sum(axis=1)
    events = np.unique(tokens[reached])
    rates = []
    for time in events:
        is_at_time = tokens == time
        rates.append(reached[is_at_time].sum() / at_risk[is_at_time][0])
    # Nelson-Aalen estimate of the cumulative hazard at the tokens of each run.
    hazards = np.append(0.0, np.cumsum(rates))
    hazard = hazards[np.searchsorted(events, tokens, side="right")]
    # The log-rank statistic is the sum of these scores over `candidate`. The scores do not depend
    # on the labels, so a permutation of labels needs no new scores.
    scores = reached - hazard
    n = len(candidate.tokens)
    return label(scores[:n], scores[n:])


def share_as_large(values: Array, assignments: Array) -> float:
    """Return the share of the sums `assignments @ values` that are at least the observed sum.

    Args:
        values: (n,), terms of each sum.
        assignments: (count, n), weights of the n values in each sum. Row 0 gives the observed sum.
    """
    sums = assignments @ values
    threshold = sums[0] - SUM_ROUNDING * np.abs(values).sum()
    return float((sums >= threshold).mean())


# Cached, because reports and studies test many gaps with equal numbers of seeds.
@cache
def signs(n: int) -> Array:
    """Return an array (count, n) of 1 and -1: in each row, one choice of signs for n values.

    Row 0 contains only 1. If 2^n is at most DRAWS, the rows are all 2^n choices. Otherwise row 0
    is followed by DRAWS random choices.
    """
    if 2**n <= DRAWS:
        # Bit j of row i is the sign of difference j; row 0 has only positive signs.
        bits = np.arange(2**n)[:, None] >> np.arange(n) & 1
        return 1.0 - 2.0 * bits
    drawn = np.random.default_rng(n).integers(0, 2, (DRAWS, n))
    return np.concatenate([np.ones((1, n)), 1.0 - 2.0 * drawn])


@cache
def chosen(n: int, total: int) -> Array:
    """Return an array (count, total) of 0 and 1: in each row, 1 marks n chosen values of `total`.

    Row 0 marks the first n values. If at most DRAWS choices exist, the rows are all choices.
    Otherwise row 0 is followed by DRAWS random choices.
    """
    if math.comb(total, n) <= DRAWS:
        places = np.array([*combinations(range(total), n)])
    else:
        rng = np.random.default_rng((n, total))
        rows = np.tile(np.arange(total), (DRAWS, 1))
        drawn = rng.permuted(rows, axis=1)[:, :n]
        places = np.concatenate([np.arange(n)[None], drawn])
    marks = np.zeros((len(places), total))
    np.put_along_axis(marks, places, 1.0, axis=1)
    return marks
