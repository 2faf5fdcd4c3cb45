"""Intervals against values worked out by hand, their coverage, and what pairing is worth."""

import math

import pytest

from diffllm.statistics.estimates import Estimate, estimate
from diffllm.statistics.gap_tests import paired

T_TABLE = {2: 12.706, 3: 4.303, 4: 3.182, 6: 2.571, 10: 2.262}
"""t(0.975, n - 1) for n values, from a printed table."""


def by_seed(values):
    return {(seed, seed): value for seed, value in enumerate(values)}


@pytest.mark.parametrize(
    ("values", "mean", "deviation"),
    [
        ([1.0, 3.0], 2.0, math.sqrt(2)),
        ([3.9, 4.0, 4.1], 4.0, 0.1),
        ([2.0, 4.0, 4.0, 6.0], 4.0, math.sqrt(8 / 3)),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3.5, math.sqrt(3.5)),
        (list(range(10)), 4.5, math.sqrt(82.5 / 9)),
    ],
)
def test_an_interval_is_mean_and_t_times_the_standard_error(values, mean, deviation):
    found = estimate(values)
    half = T_TABLE[len(values)] * deviation / math.sqrt(len(values))
    assert found.mean == pytest.approx(mean)
    assert found.seeds == len(values)
    assert found.high - found.mean == pytest.approx(half, rel=2e-4)
    assert found.mean - found.low == pytest.approx(half, rel=2e-4)


def test_one_value_has_no_interval_and_equal_values_an_empty_one():
    assert estimate([4.5]) == Estimate(4.5, None, None, 1)
    assert estimate([4.5, 4.5, 4.5]) == Estimate(4.5, 4.5, 4.5, 3)
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_a_gap_pairs_the_seeds_that_both_have():
    own = {(0, 0): 4.0, (1, 1): 5.0, (2, 2): 100.0}
    base = {(9, 9): -100.0, (1, 1): 5.5, (0, 0): 4.3}
    found = paired(own, base)
    assert found.estimate == estimate([4.0 - 4.3, 5.0 - 5.5])
    assert paired(own, {(1, 1): 5.5}).estimate == Estimate(-0.5)
    assert paired(own, {(3, 3): 1.0, (0, 1): 4.3}) is None
    assert paired({}, base) is None
