"""The order of a mixture: shares, gaps, random access, curricula and limits."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffllm.core.errors import ConfigError
from diffllm.data.config import DataConfig, SourceConfig
from diffllm.data.curriculum import Between, Point
from diffllm.data.mixture_order import MixtureOrder, in_parts, laid_out, shared_out
from diffllm.data.mixture_plan import from_sample, limited, segments

SHARES = st.lists(st.floats(0.002, 1), min_size=1, max_size=8)


def places_in_order(order, first, count):
    return order.places(np.arange(first, first + count))


@pytest.mark.slow
@settings(max_examples=25)
@given(SHARES, st.sampled_from([0, 777, 10**6, 10**12]))
def test_mixture_order_distributes_samples_of_each_source_evenly(weights, first):
    order = MixtureOrder([(0, weights)])
    count = 12_000
    sources, numbers = places_in_order(order, first, count)
    before = order.counts(first)
    parts = in_parts(weights)
    for k, weight in enumerate(np.array(parts) / sum(parts)):
        here = np.flatnonzero(sources == k)
        assert (numbers[here] == before[k] + np.arange(len(here))).all(), "once and in order"
        assert (np.diff(here) - 1 <= 2 / weight).all()
        so_far = np.cumsum(sources == k)
        windows = (so_far[10_000:] - so_far[:-10_000]) / 10_000
        assert (np.abs(windows - weight) < 0.001).all()
        assert abs(before[k] - first * parts[k] // sum(parts)) <= 2
    expected = np.bincount(sources, minlength=len(before)) + before
    assert order.counts(first + count) == expected.tolist()


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
def test_sample_count_of_each_source_stays_within_1_of_ideal_count(counts):
    size, used = sum(counts), sum(map(bool, counts))
    order = laid_out(counts)
    bound = 1 - 1 / (2 * used - 2) if used > 1 else 0
    for k, count in enumerate(counts):
        lag = np.cumsum(order == k) - count * np.arange(1, size + 1) / size
        assert np.abs(lag).max() <= bound + 1e-9


def test_mixture_order_does_not_depend_on_number_of_samples_per_read():
    order = MixtureOrder([(0, [0.5, 0.3, 0.2]), (1000, [0.1, 0.9, 0])])
    sources, numbers = places_in_order(order, 0, 3000)
    again = MixtureOrder([(0, [0.5, 0.3, 0.2]), (1000, [0.1, 0.9, 0])])
    for g in (2999, 0, 1000, 999, 64, 2000):
        source, number = places_in_order(again, g, 1)
        assert (source[0], number[0]) == (sources[g], numbers[g])
        assert again.counts(g) == np.bincount(sources[:g], minlength=3).tolist()
    assert not (sources[1000:] == 2).any(), "a source of weight 0 must not be read"


def test_mixture_order_matches_recorded_order_of_older_versions():
    """No release may change this order, because checkpoints depend on it."""
    order = MixtureOrder([(0, [0.5, 0.3, 0.2])])
    assert places_in_order(order, 0, 20)[0].tolist() == [
        0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1,
    ]  # fmt: skip


def test_sample_counts_are_rounded_by_largest_remainder_method():
    assert shared_out(10, [1, 1, 1]) == [4, 3, 3]
    assert shared_out(7, [5, 3, 2]) == [4, 2, 1]
    assert in_parts([0.2, 0, 0.6]) == (250_000_000, 0, 750_000_000)
    for weights in ([0, 0], [-1, 2], [1, 1e-5]):
        with pytest.raises(ValueError, match="weight"):
            in_parts(weights)


# Curricula


def mixture_config(curriculum=(), between=Between.constant, **weights):
    sources = {name: SourceConfig(weight=weight) for name, weight in weights.items()}
    return DataConfig(source="mixture", sources=sources, curriculum=[*curriculum], between=between)


def test_curriculum_points_are_converted_to_sample_numbers():
    half, later = Point(0.5, {"b": 2.0}), Point(64_000, {"a": 1.0, "b": 3.0})
    plan = segments(mixture_config([half, later], a=3, b=1), samples=1000, seq_len=64)
    assert plan == [(0, (0.75, 0.25)), (500, (0.0, 1.0)), (1000, (0.25, 0.75))]


def test_linear_curriculum_interpolates_weights_between_points():
    cfg = mixture_config([Point(0.5, {"a": 1}), Point(1.0, {"b": 1})], Between.linear, a=1, b=1)
    order = MixtureOrder(segments(cfg, samples=40_000, seq_len=8))
    sources, _ = places_in_order(order, 0, 40_000)
    so_far = np.cumsum(sources == 0)
    for first in range(0, 30_000, 500):
        places = np.arange(first, first + 10_000)
        wanted = np.where(places < 20_000, 0.5 + places / 40_000, 2 - places / 20_000).mean()
        got = (so_far[first + 9_999] - (so_far[first - 1] if first else 0)) / 10_000
        assert abs(got - wanted) < 0.01, first


def test_mixture_plan_never_exceeds_epoch_limit_of_a_source():
    plan = limited([(0, (0.5, 0.3, 0.2))], 0, 10_000, [0, 0, 0], [math.inf, 600, 100])
    order = MixtureOrder(plan)
    counts = order.counts(10_000)
    assert sum(counts) == 10_000
    assert [math.isclose(a, b, abs_tol=1) for a, b in zip(counts[1:], (600, 100), strict=True)]
    assert counts[1] <= 600
    assert counts[2] <= 100
    assert limited(plan, 0, 400, [0, 0, 0], [math.inf, 600, 100]) == plan
    with pytest.raises(ConfigError, match="all sources with a weight reach epochs_at_most"):
        limited([(0, (1.0,))], 0, 10_000, [0], [100])
    assert limited([(0, (1.0,))], 0, 100, [0], [100]) == [(0, (1.0,))]


def test_resumed_mixture_plan_omits_segments_before_the_resume_sample():
    plan = [(0, (1.0, 0.0)), (100, (0.5, 0.5)), (200, (0.0, 1.0))]
    assert from_sample(plan, 150) == [(150, (0.5, 0.5)), (200, (0.0, 1.0))]
    assert from_sample(plan, 100) == plan[1:]
