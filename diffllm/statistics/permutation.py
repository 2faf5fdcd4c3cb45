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
    values = np.asarray(differences, np.float64)
    return share_as_large(values, signs(len(values)))


def label(candidate: Array, base: Array) -> float:
    """Return the p-value of a label-permutation test for "`candidate` has the larger mean".

    Args:
        candidate, base: (n,) and (m,), values of two independent samples.
    """
    values = np.concatenate([candidate, base]).astype(np.float64)
    # The sum over `candidate` orders the permutations as the difference of the means does, because
    # the sum over all values is fixed.
    assignments = chosen(len(candidate), len(values))
    return share_as_large(values, assignments)


def log_rank(candidate: Times, base: Times) -> float | None:
    """Return the log-rank p-value that `candidate` needs fewer tokens to a loss than `base`.

    Return None if no run reaches the target loss, or if `candidate` or `base` contains no run.
    """
    if candidate.count + base.count == 0:
        return None
    if not candidate.tokens or not base.tokens:
        return None
    tokens = np.array([*candidate.tokens, *base.tokens], np.float64)
    reached = np.array([*candidate.reached, *base.reached], bool)
    # A run is at risk until it reaches the target loss or ends.
    is_at_risk = tokens[None, :] >= tokens[:, None]
    runs_at_risk = is_at_risk.sum(axis=1)
    event_times = np.unique(tokens[reached])
    rates = []
    for time in event_times:
        is_at_time = tokens == time
        events = reached[is_at_time].sum()
        rates.append(events / runs_at_risk[is_at_time][0])
    # Nelson-Aalen estimate of the cumulative hazard at the tokens of each run.
    hazards = np.append(0.0, np.cumsum(rates))
    past_events = np.searchsorted(event_times, tokens, side="right")
    hazard = hazards[past_events]
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
    # Equal sums of other permutations can differ from row 0 in the last bits.
    rounding = SUM_ROUNDING * np.abs(values).sum()
    is_as_large = sums >= sums[0] - rounding
    return float(is_as_large.mean())


# Cached, because reports and studies test many gaps with equal numbers of seeds.
@cache
def signs(n: int) -> Array:
    """Return an array (count, n) of 1 and -1: in each row, one choice of signs for n values.

    Row 0 contains only 1. If 2^n is at most DRAWS, the rows are all 2^n choices. Otherwise row 0
    is followed by DRAWS random choices.
    """
    if 2**n <= DRAWS:
        # Bit j of row i is the sign of difference j; row 0 has only positive signs.
        rows = np.arange(2**n)[:, None]
        bits = rows >> np.arange(n) & 1
        return 1.0 - 2.0 * bits
    # A fixed seed, so that a report of the same runs has the same p-value.
    rng = np.random.default_rng(n)
    bits = rng.integers(0, 2, (DRAWS, n))
    observed = np.ones((1, n))
    return np.concatenate([observed, 1.0 - 2.0 * bits])


@cache
def chosen(n: int, total: int) -> Array:
    """Return an array (count, total) of 0 and 1: in each row, 1 marks n chosen values of `total`.

    Row 0 marks the first n values. If at most DRAWS choices exist, the rows are all choices.
    Otherwise row 0 is followed by DRAWS random choices.
    """
    if math.comb(total, n) <= DRAWS:
        # In lexicographic order, so row 0 has the first n values.
        places = np.array([*combinations(range(total), n)])
    else:
        rng = np.random.default_rng((n, total))
        rows = np.tile(np.arange(total), (DRAWS, 1))
        permutations = rng.permuted(rows, axis=1)
        drawn = permutations[:, :n]
        observed = np.arange(n)[None]
        places = np.concatenate([observed, drawn])
    marks = np.zeros((len(places), total))
    np.put_along_axis(marks, places, 1.0, axis=1)
    return marks
