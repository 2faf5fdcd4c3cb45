"""Tests of gaps compared with values by hand and with scipy, and cases without a result."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from diffllm.statistics.divergence import Share, diverged_more
from diffllm.statistics.document_error import document_error
from diffllm.statistics.estimates import Estimate, Times, estimate, wilson
from diffllm.statistics.gap_tests import equivalence, holm, paired, seed_correlation, welch
from diffllm.statistics.permutation import label, log_rank, sign_flip
from diffllm.statistics.seed_variance import SeedSpread, pairs, pooled


def by_seed(values):
    return dict(enumerate(values))


OWN, BASE = [3.8, 3.9, 4.3, 4.0], [4.0, 4.2, 4.4, 4.1]


def test_paired_and_welch_t_tests_equal_scipy():
    found = paired(by_seed(OWN), by_seed(BASE))
    expected = stats.ttest_rel(OWN, BASE)
    assert (found.p, found.df) == (pytest.approx(expected.pvalue), 3)
    assert found.p_below() == pytest.approx(stats.ttest_rel(OWN, BASE, alternative="less").pvalue)
    assert found.p_above() == pytest.approx(1 - found.p_below())
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    other = welch(by_seed(OWN), by_seed([*BASE, 5.0]))
    expected = stats.ttest_ind(OWN, [*BASE, 5.0], equal_var=False)
    assert (other.p, other.df) == pytest.approx((expected.pvalue, expected.df))
    assert (other.low, other.high) == pytest.approx(tuple(expected.confidence_interval()))
    assert (other.seeds, other.base_seeds) == (4, 5)


def test_t_test_returns_p_value_1_if_variance_over_seeds_is_zero():
    for own in ([3.8, 4.0], [3.8, 4.0, 4.1]):
        base = [x + 0.2 for x in own]
        found = paired(by_seed(own), by_seed(base))
        assert found.zero_variance
        assert (found.p, found.p_below(), found.p_above()) == (1, 1, 1)
        assert found.estimate.low == pytest.approx(-0.2)
    found = welch(by_seed([4.0, 4.0]), by_seed([5.0, 5.0, 5.0]))
    assert found.zero_variance
    assert found.p == 1
    assert equivalence(found, 2.0).p == 1
    one = welch(by_seed([4.0, 4.0]), by_seed([5.0, 5.1, 5.2]))
    assert not one.zero_variance
    assert one.df == pytest.approx(2)


def test_t_tests_of_single_seed_return_gap_without_p_value():
    for found in (paired({0: 4.0}, {0: 4.5}), welch({0: 4.0}, {0: 4.5, 1: 4.6})):
        assert found.mean < 0
        assert found.p is found.p_below() is found.low is found.interval() is None
        assert equivalence(found, 0.1) is None
    assert welch({}, {0: 1.0}) is None


def test_paired_t_test_refuses_nonfinite_loss():
    with pytest.raises(ValueError, match="diverged"):
        paired({0: 4.0, 1: math.nan}, {0: 4.0, 1: 4.1})


def test_seed_correlation_returns_none_for_fewer_than_three_common_seeds():
    assert seed_correlation(by_seed([1.0, 2.0]), by_seed([1.0, 2.0])) is None
    assert seed_correlation(by_seed([1.0, 2, 4]), by_seed([3.0, 5, 9])) == pytest.approx(1)
    other = {9: 0.0, **by_seed([3.0, 1, 2])}
    assert seed_correlation(by_seed([1.0, 2, 3]), other) == pytest.approx(-0.5)
    assert seed_correlation(by_seed([1.0, 1, 1]), by_seed([3.0, 1, 2])) is None


def test_holm_correction_equals_p_values_computed_by_hand():
    """Holm (1979): the smallest p times m, the next times m - 1, never decreasing."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.005, 0.011, 0.02, 0.04, 0.13]) == pytest.approx([0.025, 0.044, 0.06, 0.08, 0.13])
    assert holm([0.6, 0.7]) == [1, 1]
    assert holm([]) == []
    assert holm([0.2]) == [0.2]


def test_equivalence_test_matches_scipy():
    found = paired(by_seed(OWN), by_seed(BASE))
    made = equivalence(found, 0.4)
    assert (made.low, made.high) == found.interval(0.9)
    differences = np.subtract(OWN, BASE)
    ps = [stats.ttest_1samp(differences, side * 0.4, alternative=how).pvalue
          for side, how in ((1, "less"), (-1, "greater"))]  # fmt: skip
    assert made.p == pytest.approx(max(ps))
    assert made.inside
    assert made.p < 0.05
    narrow = equivalence(found, 0.1)
    assert not narrow.inside
    assert narrow.p > 0.05
    with pytest.raises(ValueError, match="above 0"):
        equivalence(found, 0.0)


def test_divergence_rate_has_exact_binomial_confidence_interval():
    """0 of 10: upper end 1 - 0.025^(1/10); 1 of 3: 0.8% to 90.6%, from printed tables."""
    assert Share(0, 10).interval == (0, pytest.approx(1 - 0.025**0.1))
    assert Share(10, 10).interval == (pytest.approx(0.025**0.1), 1)
    assert Share(1, 3).interval == pytest.approx((0.0084, 0.9057), abs=1e-4)
    assert diverged_more(Share(1, 2), Share(1, 3))
    assert not diverged_more(Share(1, 3), Share(1, 3))


def test_wilson_interval_has_mean_coverage_of_95_percent():
    """The mean coverage over p is 95%; the coverage at one p can be lower (Brown et al., 2001)."""
    for n in (1, 5, 20, 50):
        intervals = [wilson(k / n, n) for k in range(n + 1)]
        assert all(0 <= low <= k / n <= high <= 1 for k, (low, high) in enumerate(intervals))
        for k, found in enumerate(intervals):
            expected = stats.binomtest(k, n).proportion_ci(method="wilson")
            assert found == pytest.approx((expected.low, expected.high))
        grid = np.linspace(0.005, 0.995, 199)
        covered = [
            sum(stats.binom.pmf(k, n, p) for k, (a, b) in enumerate(intervals) if a <= p <= b)
            for p in grid
        ]
        assert 0.93 < np.mean(covered) < 0.975
        assert min(covered) > 0.79


@given(st.lists(st.floats(0, 1), min_size=2, max_size=5), st.booleans())
def test_clipped_confidence_interval_contains_mean(shares, gap):
    values = [2 * x - 1 for x in shares] if gap else shares
    found = estimate(values).within(-1.0 if gap else 0.0, 1.0)
    assert (-1 if gap else 0) <= found.low <= found.mean <= found.high <= 1
    assert found.uninformative == ((found.low, found.high) == (-1 if gap else 0, 1))
    assert found.all_equal or len({*values}) > 1


def test_standard_deviation_between_seeds_is_pooled_over_arms():
    found = pooled([by_seed([1.0, 3.0]), by_seed([1.0, 2.0, 3.0]), {0: 9.0}])
    assert found == SeedSpread(pytest.approx(math.sqrt(4 / 3)), 3)
    assert pooled([{0: 1.0}]) is None
    assert pooled([by_seed([4.0, 4.0])]).sd == 0
    low, high = SeedSpread(1.0, 10).interval
    assert (low, high) == pytest.approx((math.sqrt(10 / 20.483), math.sqrt(10 / 3.247)), abs=1e-3)


def test_pairs_function_returns_standard_deviation_of_seed_differences():
    own, base = by_seed(OWN), by_seed(BASE)
    found = pairs([own, base])
    assert found.differences.sd == pytest.approx(np.subtract(OWN, BASE).std(ddof=1))
    assert (found.differences.df, found.seeds) == (3, 4)
    same = pairs([own, by_seed(np.add(OWN, 0.3))])
    assert (same.differences.sd, same.correlation) == (0, pytest.approx(1))
    assert pairs([own]) is None
    assert pairs([own, {7: 1.0, 0: 2.0}]) is None


# Documents and seeds


def test_document_error_of_equally_long_documents_is_standard_error_of_mean():
    rng = np.random.default_rng(0)
    tokens, base = np.full(200, 50), rng.normal(4, 1, (3, 200))
    seeds, texts = rng.normal(0, 0.1, (3, 1)), rng.normal(0, 0.1, 200)
    found = document_error((base + seeds + texts) * tokens, base * tokens, tokens)
    assert found == pytest.approx(texts.std(ddof=1) / math.sqrt(200))
    assert document_error(base[:, :1], base[:, :1], tokens[:1]) is None


@pytest.mark.parametrize("log", [False, True])
def test_document_error_agrees_with_jackknife_over_documents(log):
    rng = np.random.default_rng(1)
    n, tokens = 100, rng.integers(50, 900, 100)
    base = rng.normal(4, 1, n) * tokens + 0 * rng.normal(size=(4, n))
    own = base + rng.normal(-0.1, 0.1, (4, n)) * tokens

    def gap(rows):
        losses = [side[:, rows].sum(axis=1) / tokens[rows].sum() for side in (own, base)]
        if log:
            losses = [np.log(side) for side in losses]
        return (losses[0] - losses[1]).mean()

    without_one = np.array([gap(np.arange(n) != i) for i in range(n)])
    jackknife = math.sqrt((n - 1) * without_one.var())
    assert document_error(own, base, tokens, log) == pytest.approx(jackknife, rel=0.03)


def enumerated(own, base, statistic):
    """Return the share of label assignments whose statistic is at least the observed statistic."""
    both = [*own, *base]
    found = []
    for chosen in itertools.combinations(range(len(both)), len(own)):
        first = [both[i] for i in chosen]
        second = [both[i] for i in range(len(both)) if i not in chosen]
        found.append(statistic(first, second))
    return np.mean([x >= found[0] - 1e-9 for x in found])


def excess_events(own, base):
    """Return observed minus expected events of `own`, summed over event times."""
    total = 0.0
    for time in {t for t, reached in [*own, *base] if reached}:
        at_risk = [sum(t >= time for t, _ in side) for side in (own, base)]
        events = [sum(t == time and reached for t, reached in side) for side in (own, base)]
        total += events[0] - sum(events) * at_risk[0] / sum(at_risk)
    return total


@pytest.mark.parametrize("sizes", [(2, 2), (3, 5), (4, 4)])
def test_log_rank_p_value_equals_exact_permutation_p_value(sizes):
    rng = np.random.default_rng(0)
    for _ in range(10):
        sides = [
            [
                (int(t), bool(r))
                for t, r in zip(rng.integers(1, 6, n), rng.random(n) < 0.7, strict=True)
            ]
            for n in sizes
        ]  # with ties between and within arms
        expected = enumerated(*sides, excess_events)
        assert log_rank(*map(Times.of, sides)) == pytest.approx(
            expected if any(r for side in sides for _, r in side) else None
        )


def test_log_rank_p_value_agrees_with_scipy():
    rng = np.random.default_rng(1)
    own, base = (Times((rng.permutation(9) + 1.0).tolist(), [True] * 9) for _ in range(2))
    sides = [[*zip(side.tokens, side.reached, strict=True)] for side in (own, base)]
    found = stats.logrank(own.censored, base.censored, alternative="greater")
    assert np.sign(excess_events(*sides)) == np.sign(found.statistic)
    assert log_rank(own, base) == pytest.approx(found.pvalue, abs=0.02)


def test_permutation_test_is_exact_only_for_few_seeds():
    rng = np.random.default_rng(2)
    own, base = rng.normal(0.5, 1, 5), rng.normal(0, 1, 4)
    assert label(own, base) == pytest.approx(
        enumerated(own, base, lambda first, second: np.mean(first) - np.mean(second))
    )
    differences = rng.normal(0.3, 1, 7)
    flipped = [
        np.dot(signs, differences) >= differences.sum() - 1e-9
        for signs in itertools.product((1, -1), repeat=7)
    ]
    assert sign_flip(differences) == pytest.approx(np.mean(flipped))
    assert sign_flip(np.ones(5)) == 1 / 32
    assert label(np.ones(4), np.zeros(4)) == 1 / 70
    assert sign_flip(np.ones(40)) == 1 / 20_001, "drawn, not listed"
    assert label(np.ones(5), np.ones(5)) == 1, "ties count"
    many = rng.normal(0.2, 1, 30)
    expected = stats.ttest_1samp(many, 0, alternative="greater").pvalue
    assert sign_flip(many) == pytest.approx(expected, abs=0.01)


def test_median_tokens_to_target_loss_equals_kaplan_meier_estimate():
    assert Times([3, 1, 2], [True, True, True]).median == 2
    assert Times([1, 2, 3, 4], [True, False, True, True]).median == 3
    assert Times([1, 9, 9], [True, False, False]).median is None
    fast, slow = Times([1, 2, 3], [True] * 3), Times([9, 9, 9], [False] * 3)
    assert log_rank(slow, slow) is None
    assert log_rank(fast, slow) == pytest.approx(1 / 20)
    assert log_rank(slow, fast) == 1


T_TABLE = {2: 12.706, 3: 4.303, 4: 3.182, 6: 2.571, 10: 2.262}
"""t(0.975, n - 1) for n values, from a printed table."""


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
def test_half_width_of_confidence_interval_equals_closed_form(values, mean, deviation):
    found = estimate(values)
    half = T_TABLE[len(values)] * deviation / math.sqrt(len(values))
    assert found.mean == pytest.approx(mean)
    assert found.seeds == len(values)
    assert found.high - found.mean == pytest.approx(half, rel=2e-4)
    assert found.mean - found.low == pytest.approx(half, rel=2e-4)


def test_estimate_of_single_seed_has_no_confidence_interval():
    assert estimate([4.5]) == Estimate(4.5, None, None, 1)
    assert estimate([4.5, 4.5, 4.5]) == Estimate(4.5, 4.5, 4.5, 3)
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_paired_gap_ignores_seeds_missing_from_one_arm():
    own = {(0, 0): 4.0, (1, 1): 5.0, (2, 2): 100.0}
    base = {(9, 9): -100.0, (1, 1): 5.5, (0, 0): 4.3}
    found = paired(own, base)
    assert found.estimate == estimate([4.0 - 4.3, 5.0 - 5.5])
    assert paired(own, {(1, 1): 5.5}).estimate == Estimate(-0.5)
    assert paired(own, {(3, 3): 1.0, (0, 1): 4.3}) is None
    assert paired({}, base) is None
