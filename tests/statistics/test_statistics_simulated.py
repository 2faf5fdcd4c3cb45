"""Simulations with known truth: coverage of intervals, power and false positives of tests.

All draws have fixed seeds, so results are reproducible.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtrit
from tiers import slow_but

import diffllm
from diffllm.statistics.gap_tests import equivalence, holm, paired, welch
from diffllm.statistics.power_analysis import least_seeds, paired_power
from diffllm.statistics.smallest_p import smallest_p

PAGE = Path(diffllm.__file__).parents[1] / "docs" / "statistics.md"
DRAWS = 4000
GAP, SD = -0.02, 0.02


def arms(seeds, draws=DRAWS, correlation=0.0, gap=GAP, ratio=1.0):
    """Yield losses of two arms by seed, `draws` times.

    Args:
        ratio: standard deviation of the base, divided by that of the other arm.
    """
    rng = np.random.default_rng([seeds, int(100 * correlation), int(10 * ratio)])
    shared = rng.normal(0, math.sqrt(correlation), (draws, seeds))
    noise = rng.normal(0, math.sqrt(1 - correlation), (2, draws, seeds))
    own, base = 4 + gap + SD * (shared + noise[0]), 4 + SD * ratio * (shared + noise[1])
    for x, y in zip(own, base, strict=True):
        yield dict(enumerate(x)), dict(enumerate(y))


def rate(hits):
    hits = list(hits)
    return sum(hits) / len(hits)


def within_chance(found, expected, draws):
    return abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


@pytest.mark.parametrize("seeds", slow_but([5], [3, 5, 8]))
def test_confidence_intervals_of_t_tests_have_95_percent_coverage(seeds):
    for test, correlation in ((paired, 0.6), (welch, 0.0)):
        found = [test(*both) for both in arms(seeds, correlation=correlation)]
        assert 0.93 <= rate(each.low <= GAP <= each.high for each in found) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 8])
@pytest.mark.parametrize(("correlation", "ratio"), [(0.0, 1.0), (0.9, 1.0), (0.0, 2.0)])
def test_t_test_coverage_is_independent_of_correlation_and_variances(seeds, correlation, ratio):
    both = list(arms(seeds, 6000, correlation, ratio=ratio))
    tests = [paired, welch] if correlation == 0 else [paired]
    for test in tests:
        found = [test(*each) for each in both]
        assert 0.93 <= rate(each.low <= GAP <= each.high for each in found) <= 0.97


@pytest.mark.parametrize("seeds", slow_but([3], [3, 5, 8]))
def test_simulated_power_of_paired_t_test_equals_predicted_power(seeds):
    both = list(arms(seeds, gap=2 * SD))
    sd = SD * math.sqrt(2)
    found = rate(paired(*each).p < 0.05 for each in both)
    assert within_chance(found, paired_power(2 * SD, sd, seeds), DRAWS)
    found = rate(paired(*each).p_above() < 0.05 for each in both)
    assert within_chance(found, paired_power(2 * SD, sd, seeds, sides=1), DRAWS)


def pairing_narrows_above(seeds):
    """Return the correlation over seeds above which pairing narrows the 95% interval of a gap."""
    paired_t, unpaired_t = (float(stdtrit(df, 0.975)) for df in (seeds - 1, 2 * seeds - 2))
    return 1 - (unpaired_t / paired_t) ** 2


def test_documented_tables_of_power_and_p_values_match_code():
    text = PAGE.read_text(encoding="utf-8") + PAGE.with_name("power.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d.]+)[^|]* \| (0.*) \| (\d+) seeds \|$", text, re.M)
    assert len(rows) == 4
    for gap, cells, least in rows:
        powers = [paired_power(float(gap), 1.0, seeds) for seeds in (3, 5, 8, 12)]
        assert cells == " | ".join(f"{power:.2f}" for power in powers)
        assert int(least) == least_seeds(lambda n, gap=gap: paired_power(float(gap), 1.0, n), 0.8)
    pays = " | ".join(f"{pairing_narrows_above(seeds):.2f}" for seeds in (3, 4, 5, 8, 12))
    assert f"above a correlation of | {pays} |" in text
    for unit, test in (
        ("sign of each paired difference", "paired"),
        ("arm of each run", "log_rank"),
    ):
        smallest = " | ".join(f"{smallest_p(test, n, n):.3g}" for n in (3, 4, 5, 6, 7, 8))
        assert f"| {unit} | {smallest} |" in text


def test_least_seeds_function_returns_fewest_seeds_that_reach_target_power():
    for gap in (0.005, 0.02, 0.1):
        n = least_seeds(lambda seeds, gap=gap: paired_power(gap, SD, seeds), 0.8)
        assert paired_power(gap, SD, n) >= 0.8
        assert n == 2 or paired_power(gap, SD, n - 1) < 0.8
    assert least_seeds(lambda _: 0.1, 0.8) is None


def test_power_of_paired_t_test_rises_with_gap_and_seeds():
    gaps, seeds = (0.01, 0.5, 1, 2, 3, 5, 9, 99), (2, 3, 5, 8, 12, 40, 1000)
    for sides in (1, 2):
        table = np.array([[paired_power(gap, 1.0, n, sides=sides) for gap in gaps] for n in seeds])
        assert (np.diff(table, axis=0) > -1e-9).all()
        assert (np.diff(table, axis=1) > -1e-9).all()
        assert 0 < table.min() <= table.max() <= 1
    assert paired_power(1e6, SD, 3) == 1
    assert paired_power(1e-12, SD, 3, sides=1) == pytest.approx(0.05, abs=0.02)


def test_holm_correction_limits_familywise_error_rate():
    """Eight equal arms are compared with the same base, so their gaps are correlated."""
    rng, draws = np.random.default_rng(0), 400
    false = 0
    for losses in rng.normal(4, SD, (draws, 9, 5)):
        base, *others = [dict(enumerate(arm)) for arm in losses]
        false += min(holm([paired(own, base).p for own in others])) < 0.05
    assert false / draws < 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)
    assert false / draws > 0.005


@pytest.mark.parametrize("seeds", [3, 8])
def test_equivalence_test_has_at_most_5_percent_false_positives(seeds):
    both = list(arms(seeds, gap=0.04))
    wrong = rate(equivalence(welch(*each), 0.04).p < 0.05 for each in both)
    assert wrong < 0.05 + 3 * math.sqrt(0.05 * 0.95 / DRAWS)
    if seeds == 8:  # without a gap, equivalence must be shown
        inside = [equivalence(welch(*each), 0.04).inside for each in arms(8, 300, gap=0.0)]
        assert rate(inside) > 0.9
