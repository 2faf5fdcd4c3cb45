"""Intervals against values worked out by hand, their coverage, and what pairing is worth."""

import math

import numpy as np
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


def test_a_gap_is_the_estimate_of_the_differences():
    found = paired(by_seed([3.8, 3.9, 4.3]), by_seed([4.0, 4.2, 4.4]))
    half = 4.303 * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(-0.2)
    assert (found.low, found.high) == pytest.approx((-0.2 - half, -0.2 + half), abs=1e-4)
    assert found.seeds == 3


def test_a_gap_pairs_the_seeds_that_both_have():
    own = {(0, 0): 4.0, (1, 1): 5.0, (2, 2): 100.0}
    base = {(9, 9): -100.0, (1, 1): 5.5, (0, 0): 4.3}
    found = paired(own, base)
    assert found.estimate == estimate([4.0 - 4.3, 5.0 - 5.5])
    assert paired(own, {(1, 1): 5.5}).estimate == Estimate(-0.5)
    assert paired(own, {(3, 3): 1.0, (0, 1): 4.3}) is None
    assert paired({}, base) is None


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_95_of_100_intervals_hold_the_truth(seeds):
    rng, draws, truth = np.random.default_rng(seeds), 2000, 3.7
    inside = 0
    for values in rng.normal(truth, 0.03, (draws, seeds)):
        found = estimate(values)
        inside += found.low <= truth <= found.high
    tolerance = 4 * math.sqrt(0.95 * 0.05 / draws)
    assert abs(inside / draws - 0.95) < tolerance


def test_95_of_100_paired_intervals_hold_the_gap_under_common_noise():
    rng, draws, gap = np.random.default_rng(0), 2000, -0.02
    inside = 0
    for _ in range(draws):
        common = rng.normal(4, 0.5, 3)
        own, base = common + rng.normal(gap, 0.01, 3), common + rng.normal(0, 0.01, 3)
        found = paired(by_seed(own), by_seed(base))
        inside += found.low <= gap <= found.high
    assert abs(inside / draws - 0.95) < 4 * math.sqrt(0.95 * 0.05 / draws)


def test_pairing_removes_what_seeds_have_in_common():
    rng = np.random.default_rng(0)
    base, own = rng.normal(4, 0.01, 4), rng.normal(3.9, 0.01, 4)
    noise = rng.normal(0, 10, 4)
    quiet = paired(by_seed(own), by_seed(base))
    noisy = paired(by_seed(own + noise), by_seed(base + noise))
    assert (noisy.mean, noisy.low, noisy.high) == pytest.approx(
        (quiet.mean, quiet.low, quiet.high), abs=1e-12
    )
    assert noisy.high < 0
    assert estimate(own + noise).high > estimate(base + noise).low  # unpaired, nothing would show
