"""Both published definitions of a spike, compared with a plain recomputation."""

import json
import math

import numpy as np
import pytest
from tiers import slow_but

from diffllm.metrics.spikes import SpikeMonitor

NAN, INF = math.nan, math.inf


def finite_before(series, index):
    return np.array([v for v in series[:index] if math.isfinite(v)])


def spikes_window128(series):
    """Return indices above mean + 6 sigma of the previous 128 finite values, if 128 exist."""
    found = []
    for i, value in enumerate(series):
        window = finite_before(series, i)[-128:]
        above = len(window) == 128 and value > np.mean(window) + 6 * np.std(window)
        if above or not math.isfinite(value):
            found.append(i)
    return found


def spikes_olmo2(series):
    """Return indices 7 sigma or more from the mean of the previous 128 to 1,000 finite values."""
    found = []
    for i, value in enumerate(series):
        window = finite_before(series, i)[-1000:]
        far = False
        if len(window) >= 128 and np.std(window) > 0:
            far = abs(value - np.mean(window)) / np.std(window) >= 7
        if far or not math.isfinite(value):
            found.append(i)
    return found


def spike_steps(series, start=0, monitor=None):
    """Return the steps at which the totals of a monitor increase, for losses and gradient norms."""
    monitor = monitor or SpikeMonitor()
    steps = {"spikes": [], "spikes_olmo2": []}
    for i, value in enumerate(series[start:], start):
        before = monitor.metrics()
        monitor.update(value, value)
        after = monitor.metrics()
        for name, found in steps.items():
            grown = after[f"{name}/loss_total"] - before[f"{name}/loss_total"]
            assert grown in (0, 1)
            assert after[f"{name}/grad_total"] == after[f"{name}/loss_total"]
            if grown:
                found.append(i)
    return steps


def training_like(steps=1500, seed=0):
    """Return a falling loss with noise, outliers, a plateau, NaN and infinities."""
    rng = np.random.default_rng(seed)
    series = 2.5 + 6 * np.exp(-np.arange(steps) / 60) + rng.normal(0, 0.05, steps)
    for at, jump in ((600, 1.5), (601, 1.5), (640, 0.6), (1400, -4.0), (1200, 9.0), (1203, 0.9)):
        series[at] += jump
    series[1250:1300] += 0.8
    series[[3, 700]] = NAN
    series[[127, 710]] = INF
    series[711] = -INF
    return series.tolist()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_spike_counters_find_same_steps_as_independent_implementation(seed):
    series = training_like(seed=seed)
    found = spike_steps(series)
    assert found["spikes"] == spikes_window128(series)
    assert found["spikes_olmo2"] == spikes_olmo2(series)
    # The definitions differ on this series, so the test would detect a mix-up.
    assert set(found["spikes"]) != set(found["spikes_olmo2"])
    assert {3, 127, 600, 700, 710, 711, 1200} <= set(found["spikes"])
    assert 1400 in found["spikes_olmo2"]
    assert 1400 not in found["spikes"]


@pytest.mark.parametrize(("definition", "window"), [("spikes", 128), ("spikes_olmo2", 1000)])
def test_rolling_spike_total_ignores_old_spikes(definition, window):
    series = training_like()
    found = {"spikes": spikes_window128, "spikes_olmo2": spikes_olmo2}[definition](series)
    so_far = np.isin(np.arange(len(series)), found).cumsum()
    monitor, counts = SpikeMonitor(), []
    for i, value in enumerate(series):
        monitor.update(value, 0.0)
        metrics = monitor.metrics()
        counts.append(metrics[f"{definition}/loss_rolling_total"])
        assert counts[i] == so_far[i] - (so_far[i - window] if i >= window else 0)
        assert metrics[f"{definition}/loss_rolling_score"] == counts[i] / min(i + 1, window)
        assert metrics[f"{definition}/loss_total"] == so_far[i]
        assert metrics[f"{definition}/loss_score"] == so_far[i] / (i + 1)
    assert counts[-1] < so_far[-1], "all spikes are in the last window"


def test_spike_monitor_counts_skipped_updates():
    monitor = SpikeMonitor()
    for skipped in (True, True, False, True):
        monitor.update(1.0, 1.0, skipped)
    assert monitor.metrics()["spikes/skipped_total"] == 3
    assert (monitor.skipped_in_a_row, monitor.longest_skip) == (1, 2)
    monitor.forget_skips()
    monitor.update(1.0, 1.0, True)
    assert (monitor.skipped_in_a_row, monitor.longest_skip) == (1, 1)


def alternating(count):
    """Return values with mean 0 and standard deviation 1 over any even number of values."""
    return [1.0, -1.0] * (count // 2)


@pytest.mark.parametrize(
    ("value", "window128", "olmo2"),
    [
        (6.0, False, False),  # spikes are above 6 sigma
        (6.001, True, False),
        (6.999, True, False),
        (7.0, True, True),  # spikes_olmo2 includes exactly 7 sigma
        (-6.5, False, False),
        (-7.0, False, True),  # spikes_olmo2 is two-sided
        (-50.0, False, True),
    ],
)
def test_spike_counters_use_documented_sigma_thresholds(value, window128, olmo2):
    found = spike_steps([*alternating(128), value])
    assert found == {"spikes": [128] if window128 else [], "spikes_olmo2": [128] if olmo2 else []}


@pytest.mark.parametrize(("before", "counts"), [(126, False), (127, False), (128, True)])
def test_finite_loss_counts_as_spike_only_after_128_earlier_losses(before, counts):
    series = [*alternating(128)[:before], 100.0]
    expected = [before] if counts else []
    assert spike_steps(series) == {"spikes": expected, "spikes_olmo2": expected}


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 2.302585092994046, 1e-12, 3e38])
def test_constant_loss_has_no_spikes(value):
    assert spike_steps([value] * 1200) == {"spikes": [], "spikes_olmo2": []}


def test_loss_increase_after_128_constant_losses_is_counted_as_spike():
    found = spike_steps([*([2.0] * 128), 2.1])
    assert found == {"spikes": [128], "spikes_olmo2": [128]}


def test_spikes_of_loss_and_gradient_norm_are_counted_separately():
    monitor = SpikeMonitor()
    quiet = alternating(200)
    loss, grad = list(quiet), list(quiet)
    loss[150] = 50.0
    grad[160] = grad[170] = NAN
    grad[180] = -50.0
    for values in zip(loss, grad, strict=True):
        monitor.update(*values)
    metrics = monitor.metrics()
    totals = ("loss_total", "grad_total")
    assert {n: metrics[n] for n in metrics if n.endswith(totals)} == {
        "spikes/loss_total": 1,
        "spikes/grad_total": 2,
        "spikes_olmo2/loss_total": 1,
        "spikes_olmo2/grad_total": 3,
        "spikes_detrended/loss_total": 1,
        "spikes_detrended/grad_total": 2,  # NaN counts; norms of 0 and below are ignored
    }


def test_spike_monitor_judges_every_nonfinite_loss():
    monitor, series = SpikeMonitor(), [NAN, *alternating(130), INF, 1.0]
    for i, value in enumerate(series):
        monitor.update(value, 1.0)
        metrics = monitor.metrics()
        judged = sum(
            len(finite_before(series, j)) >= 128 or not math.isfinite(series[j])
            for j in range(i + 1)
        )
        for definition in ("spikes", "spikes_olmo2"):
            assert metrics[f"{definition}/loss_judged"] == judged
    assert judged == 5
    assert metrics["spikes/loss_score"] == 2 / len(series)


@pytest.mark.parametrize("cut", slow_but([0, 128, 701], [0, 64, 128, 600, 601, 701, 1000, 1499]))
def test_restored_spike_monitor_matches_uninterrupted_monitor(cut):
    series = training_like()
    whole, first = SpikeMonitor(), SpikeMonitor()
    for value in series:
        whole.update(value, -value, value > 5)
    for value in series[:cut]:
        first.update(value, -value, value > 5)
    second = SpikeMonitor()
    second.update(7.0, 7.0)  # load_state_dict must replace all earlier state
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for value in series[cut:]:
        second.update(value, -value, value > 5)
    assert second.metrics() == whole.metrics()
    assert second.recent_loss(100) == whole.recent_loss(100)
    assert second.skipped_in_a_row == whole.skipped_in_a_row
    assert second.longest_skip == whole.longest_skip


def test_recent_loss_returns_mean_of_last_n_finite_losses():
    monitor = SpikeMonitor()
    assert math.isnan(monitor.recent_loss(10))
    for value in [5.0, 1.0, NAN, 3.0]:
        monitor.update(value, 0.0)
    assert monitor.recent_loss(2) == 2.0
    assert monitor.recent_loss(10) == 3.0
