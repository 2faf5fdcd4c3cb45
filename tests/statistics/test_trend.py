"""Slopes of gaps: planted lines, units, and simulated coverage of intervals."""

import math

import numpy as np
import pytest

from diffllm.statistics.trend import LEADING_SHARE, common_points, fit_line, gap_trend

TOKENS = np.arange(1, 11) * 1e5
SLOPE, DRAWS = 0.004, 4000


def planted(seeds, slope=SLOPE, noise=0.0, correlation=0.0, rng=None, x=TOKENS):
    """Return curves of two arms by seed, with gap -0.03 + slope * log2(x / first x).

    Noise along each curve is a stationary AR(1) process with the given correlation.
    """
    rng = rng or np.random.default_rng(0)
    places = np.arange(len(x))
    covariance = correlation ** np.abs(places[:, None] - places)
    shocks = rng.normal(0, noise, (seeds, 2, len(x))) @ np.linalg.cholesky(covariance).T
    common = 6 - 0.4 * np.log2(x / x[0]) + 0.02 * rng.normal(size=(seeds, 1))
    candidate = common - 0.03 + slope * np.log2(x / x[0]) + shocks[:, 0]
    base = common + shocks[:, 1]
    return tuple({seed: (x, y) for seed, y in enumerate(side)} for side in (candidate, base))


@pytest.mark.parametrize("slope", [0.004, -0.02, 0.0])
def test_gap_trend_returns_exact_slope_if_losses_have_no_noise(slope):
    found = gap_trend(*planted(3, slope))
    assert found.slope.mean == pytest.approx(slope, abs=1e-13)
    assert found.start == pytest.approx(-0.03)
    assert found.end == pytest.approx(-0.03 + slope * math.log2(10))
    assert (found.points, found.first, found.last, found.slope.seeds) == (10, 1e5, 1e6, 3)


def test_gap_trend_slope_does_not_depend_on_unit_of_x():
    x = TOKENS[1:]  # The window begins at the first of TOKENS: rounding of a unit would move it.
    one = gap_trend(*planted(4, noise=0.01, x=x)).slope
    for unit in (1e-6, 2.0, 12_345.678):
        other = gap_trend(*planted(4, noise=0.01, x=unit * x)).slope
        assert (other.mean, other.error) == pytest.approx((one.mean, one.error), rel=1e-9)


def test_line_fit_over_uneven_x_equals_numpy_polyfit():
    rng = np.random.default_rng(1)
    x = np.sort(rng.uniform(1e3, 1e9, 7))
    y = rng.normal(size=7)
    slope, at_zero = np.polyfit(np.log2(x), y, 1)
    found = fit_line(x, y)
    assert found.slope == pytest.approx(slope)
    ends = at_zero + slope * np.log2(x[[0, -1]])
    assert (found.start, found.end) == pytest.approx(tuple(ends))


def test_gap_trend_of_single_seed_has_no_confidence_interval():
    alone = gap_trend(*planted(1)).slope
    assert alone.mean == pytest.approx(SLOPE)
    assert alone.interval() is alone.p is alone.p_below() is None
    equal = gap_trend(*planted(3)).slope
    assert (equal.zero_variance, equal.p) == (True, 1)
    assert gap_trend({}, planted(1)[1]) is None


@pytest.mark.parametrize("x", [[1.0, 2.0], [1.0, 2.0, 2.0], [0.0, 1.0, 2.0]])
def test_line_fit_raises_value_error_without_three_different_positive_x_values(x):
    with pytest.raises(ValueError, match="at least 3 different x"):
        fit_line(np.array(x), np.zeros(len(x)))


def test_common_points_exclude_x_values_where_any_curve_is_not_finite():
    every = np.arange(1, 41) * 100
    hole = np.where(every == 2100, np.nan, every * 1.0)
    curves = [(every, hole), (every[::2], 2.0 * every[::2])]
    x, (first, second) = common_points(curves, LEADING_SHARE)
    expected = [n for n in range(100, 4000, 200) if n != 2100 and n >= LEADING_SHARE * 3900]
    assert x.tolist() == first.tolist() == expected
    assert (second == 2 * x).all()
    assert common_points([])[0].size == 0
    assert common_points([(every, hole), (every + 1, hole)])[0].size == 0


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "correlation"), [(3, 0.9), (5, 0.0), (5, 0.9), (8, 0.9)])
def test_gap_slope_interval_has_95_percent_coverage_if_noise_is_autocorrelated(seeds, correlation):
    rng = np.random.default_rng([seeds, int(10 * correlation)])
    hits = [
        found.low <= SLOPE <= found.high
        for _ in range(DRAWS)
        for curves in [planted(seeds, noise=0.01, correlation=correlation, rng=rng)]
        for found in [gap_trend(*curves).slope]
    ]
    assert 0.93 <= sum(hits) / DRAWS <= 0.97


def test_rising_gap_is_significant_only_in_test_for_positive_slope():
    rising = gap_trend(*planted(5, 0.01, 0.005)).slope
    assert rising.p_above() < 0.01 < 0.99 < rising.p_below()
    assert rising.p == pytest.approx(2 * rising.p_above())
    assert rising.p_above(0.02) > 0.5
