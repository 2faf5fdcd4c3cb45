"""Number of seeds from a pilot, the rate of too few seeds, and the smallest p of a design."""

import itertools
import math
from functools import cache

import numpy as np
import pytest

from diffllm.statistics.estimates import Times
from diffllm.statistics.permutation import label, log_rank, sign_flip
from diffllm.statistics.power_analysis import chance_of_less, paired_power
from diffllm.statistics.seed_variance import SeedSpread
from diffllm.statistics.smallest_p import seeds_for_p, smallest_p

PILOTS = 1500


def share_of_pilots_asking_for_less(power, upper, less):
    """Simulate pilots of two arms with three seeds and a true standard deviation of 1.

    Returns the share of pilots whose number of seeds has a true power below `less`.
    """
    losses = np.random.default_rng(0).normal(size=(PILOTS, 2, 3))
    sds = np.sort(np.sqrt(losses.var(axis=2, ddof=1).mean(axis=1)))
    true_power = cache(lambda n: power(1.0, n))
    n, too_few = 2, 0
    for sd in sds * (SeedSpread(1.0, 4).upper if upper else 1.0):
        while power(sd, n) < 0.8:
            n += 1
        too_few += true_power(n) < less
    return too_few / PILOTS


@pytest.mark.parametrize(
    ("power", "less", "by_sd", "by_upper"),
    [
        (lambda sd, n: paired_power(1.0, sd, n, sides=1), 0.5, 0.168, 0.038),
        (lambda sd, n: paired_power(1.0, sd, n), 0.8, 0.524, 0.164),
        (lambda sd, n: paired_power(1.0, sd, n), 0.5, 0.16, 0.04),
    ],
)
def test_chance_of_too_few_seeds_matches_simulated_pilot_studies(power, less, by_sd, by_upper):
    pilot = SeedSpread(1.0, 4)
    for upper, expected in ((False, by_sd), (True, by_upper)):
        found = chance_of_less(power, pilot, pilot.upper if upper else 1.0, 0.8, less)
        assert found == pytest.approx(expected, abs=0.006)
        simulated = share_of_pilots_asking_for_less(power, upper, less)
        assert abs(simulated - found) < 4 * math.sqrt(found * (1 - found) / PILOTS)


@pytest.mark.parametrize("df", [1, 4, 10])
@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_seed_count_from_upper_sd_limit_is_sufficient_in_80_percent_of_pilots(df, unit):
    """Small gaps have the largest share, because their numbers of seeds are nearly continuous."""
    shares = []
    for gap in (0.1, 0.7, 1.3, 2.0, 3.0):
        pilot = SeedSpread(unit, df)

        def power(sd, n, gap=gap):
            return paired_power(gap * unit, sd, n)

        shares.append(chance_of_less(power, pilot, pilot.upper / unit, 0.8, 0.8))
    assert max(shares) == pytest.approx(shares[0], abs=1e-9)
    assert shares[0] == pytest.approx(0.2, abs=0.001)
    assert min(shares) >= 0


def test_chance_of_too_few_seeds_equals_none_if_target_power_is_unreachable():
    assert chance_of_less(lambda sd, n: 0.06, SeedSpread(1.0, 4), 1.0, 0.8, 0.5) is None
    assert chance_of_less(lambda sd, n: 0.99, SeedSpread(1.0, 4), 1.0, 0.8, 0.5) == 0


@pytest.mark.parametrize(
    ("test", "own", "base", "sides", "expected"),
    [
        ("paired", 5, 5, 2, 0.0625), ("paired", 8, 8, 2, 0.0078125), ("paired", 5, 5, 1, 1 / 32),
        ("log_rank", 3, 3, 1, 0.05), ("log_rank", 5, 5, 2, 2 / 252), ("log_rank", 5, 4, 1, 1 / 126),
        ("paired", 1, 1, 2, 1.0), ("paired", 0, 0, 2, 1.0), ("log_rank", 1000, 1000, 1, 1 / 20_001),
    ],
)  # fmt: skip
def test_smallest_possible_p_value_equals_closed_form(test, own, base, sides, expected):
    assert smallest_p(test, own, base, sides) == pytest.approx(expected)


def test_fully_separated_samples_give_smallest_possible_p_value():
    early, late = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0, 7.0])
    assert sign_flip(late) == smallest_p("paired", 4, 4)
    assert label(late, early) == smallest_p("log_rank", 4, 3)
    own, base = (Times([*side], [True] * len(side)) for side in (early, late))
    assert log_rank(own, base) == smallest_p("log_rank", 3, 4)


def test_seeds_for_p_function_returns_fewest_seeds_that_allow_significance():
    for test, tests, sides in itertools.product(("paired", "log_rank"), (1, 4), (1, 2)):
        n = seeds_for_p(test, 0.05, tests, sides)
        assert smallest_p(test, n, n, sides) * tests < 0.05
        assert n == 2 or smallest_p(test, n - 1, n - 1, sides) * tests >= 0.05
    assert seeds_for_p("log_rank", 0.05) == 4, "3 against 3 seeds give 0.05, not less"
    assert seeds_for_p("log_rank", 1e-5) is None, "tests of many seeds draw 20,000 assignments"
