"""Events of steps, and events.jsonl after kills, resumes and damage."""

import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from disks import small_disk

from diffllm.core.run_files import RunFile
from diffllm.metrics.events import (
    BatchPlace,
    Event,
    EventsFile,
    append_stall,
    events_of_step,
    read_events,
)
from diffllm.metrics.spikes import SpikeMonitor

PLACE = BatchPlace("9da6", 0, 0, 32, "stream", {"corpus": [48, 56]})
SKIPPED = Event("skipped", 7, 448, value=5.5, lr=1e-3, batch=PLACE)


def noisy_series(seed: int, steps: int = 600) -> np.ndarray:
    """Return noise with planted spikes, drops, NaN and infinity, (steps,)."""
    rng = np.random.default_rng(seed)
    values = 3 + 3 * np.exp(-np.arange(steps) / 60) + rng.normal(0, 0.1, steps)
    at = rng.choice(steps, 40, replace=False)
    values[at[:20]] += rng.choice([-1.5, 1.0, 3.0], 20)
    values[at[20:32]] = rng.choice([math.nan, math.inf], 12)
    return values


@pytest.mark.parametrize("seed", range(4))
def test_events_of_each_definition_equal_its_count_and_have_height_above_its_threshold(seed):
    monitor, events = SpikeMonitor(), []
    rng = np.random.default_rng(seed + 100)
    losses, norms = noisy_series(seed), np.abs(noisy_series(seed + 10))
    for step, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True), 1):
        skipped = bool(rng.random() < 0.02)
        spikes = monitor.update(loss, norm, skipped)
        event = Event("skipped", step, 64 * step, value=loss, batch=PLACE)
        events += events_of_step(event, skipped, spikes, norm)
    totals = monitor.metrics()
    counts = Counter((event.kind, event.definition) for event in events)
    for name, values in (("loss", losses), ("grad", norms)):
        finite = np.isfinite(values)
        continued = (~finite[1:] & ~finite[:-1]).sum()
        total = totals[f"spikes_detrended/{name}_total"]
        assert counts[f"{name}_spike", "spikes_detrended"] == total
        for definition in ("spikes", "spikes_olmo2"):
            expected = totals[f"{definition}/{name}_total"] - continued
            assert counts[f"{name}_spike", definition] == expected > 0
    assert counts["skipped", None] == totals["spikes/skipped_total"] > 0
    assert len({(e.kind, e.definition, e.step) for e in events}) == len(events)
    thresholds = {"spikes": 6, "spikes_olmo2": 7, "spikes_detrended": 4}
    for event in events:
        values = norms if event.kind == "grad_spike" else losses
        assert event.value == pytest.approx(values[event.step - 1], nan_ok=True)
        if event.definition and math.isfinite(event.value):
            assert event.height is not None
            two_sided = event.definition == "spikes_olmo2"
            height = abs(event.height) if two_sided else event.height
            assert height >= thresholds[event.definition]
        else:
            assert event.height is None


@pytest.mark.parametrize("resumed", [False, True])
def test_consecutive_values_that_are_not_finite_are_one_event_of_each_definition(resumed):
    monitor, first_steps = SpikeMonitor(), Counter()
    values = [1.0, 1.1] * 50 + [math.nan, math.inf] * 500 + [1.0] * 20 + [math.nan] * 50
    for step, value in enumerate(values, 1):
        if resumed and step % 7 == 0:
            state = json.loads(json.dumps(monitor.state_dict()))
            monitor = SpikeMonitor()
            monitor.load_state_dict(state)
        first_steps.update((name, step) for name in monitor.update(value, value))
    assert first_steps == {(name, step): 1 for name in monitor.counters for step in (101, 1121)}
    assert monitor.metrics()["spikes/loss_total"] == 1050


def test_heights_are_distances_in_standard_deviations_of_each_definition():
    rng = np.random.default_rng(5)
    losses = rng.normal(5, 0.1, 140)
    monitor = SpikeMonitor()
    for loss in losses.tolist():
        monitor.update(loss, 1.0)
    low = losses.mean() - 20 * losses.std()
    spikes = monitor.update(float(low), 1.0)
    assert spikes["spikes_olmo2/loss"].height == pytest.approx(-20)
    assert "spikes/loss" not in spikes
    recent = [*losses[-127:].tolist(), low]
    high = np.mean(recent) + 15 * np.std(recent)
    assert monitor.update(float(high), 1.0)["spikes/loss"].height == pytest.approx(15)


def append_events(path: Path, events: list[Event], last_step: int = 0) -> None:
    file = EventsFile(path, last_step)
    for event in events:
        file.write(event)
    file.close()


@pytest.mark.parametrize("last", [0, 4, 7, 9])
def test_resume_removes_only_events_of_repeated_steps(tmp_path, last):
    path = tmp_path / RunFile.EVENTS
    steps = [replace(SKIPPED, step=step) for step in (3, 5, 7)]
    processes = [Event("restart", 2, 64), Event("stall", 7, 448, detail="rank 1 is missing")]
    append_events(path, [*steps, *processes])
    with open(path, "ab") as stream:
        stream.write(b'{"kind": "skipped", "st')
    assert read_events(tmp_path) == [*steps, *processes]
    append_events(path, [replace(SKIPPED, step=10)], last)
    expected = [event for event in steps if event.step <= last]
    assert read_events(tmp_path) == [*expected, *processes, replace(SKIPPED, step=10)]


def test_end_of_run_that_was_killed_before_its_summary_is_written_once(tmp_path):
    end = Event("diverged", 8, 512, detail="no finite held-out loss")
    for _ in range(2):
        file = EventsFile(tmp_path / RunFile.EVENTS, 8)
        file.write_end(end)
        file.close()
    assert read_events(tmp_path) == [end]


def test_stall_that_several_ranks_report_is_written_once_between_other_events(tmp_path):
    file, stall = EventsFile(tmp_path / RunFile.EVENTS), Event("stall", 7, 448, detail="a" * 500)
    file.write(SKIPPED)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(append_stall, [tmp_path] * 8, [stall] * 8))
    file.write(replace(SKIPPED, step=8))
    append_stall(tmp_path, stall)
    file.close()
    kinds = [event.kind for event in read_events(tmp_path)]
    assert kinds == ["skipped", "stall", "skipped", "stall"]


def test_full_disk_damages_no_line_and_missing_events_are_written_later(tmp_path):
    stall = Event("stall", 7, 448)
    with small_disk(tmp_path / "disk", "64k") as disk:
        file = EventsFile(disk / RunFile.EVENTS)
        append_stall(disk, stall)
        (ballast := disk / "ballast").write_bytes(b"0" * 40 * 1024)
        steps = [replace(SKIPPED, step=step) for step in range(1, 101)]
        for event in steps:
            file.write(event)
        assert 1 < len(read_events(disk)) < 100, "the disk was not full"
        ballast.unlink()
        file.close()
        assert read_events(disk) == [stall, *steps]


def test_values_that_are_not_finite_are_null(tmp_path):
    events = [replace(SKIPPED, value=math.nan), replace(SKIPPED, value=math.inf)]
    append_events(tmp_path / RunFile.EVENTS, events)
    assert [event.value for event in read_events(tmp_path)] == [None, None]


def test_failed_write_removes_no_stall_of_another_process(tmp_path, monkeypatch):
    """Between the size of the file and the failure, another process tries to append a stall."""
    file, stall = EventsFile(tmp_path / RunFile.EVENTS), Event("stall", 7, 448)
    append = Thread(target=append_stall, args=(tmp_path, stall))
    stream = file.file.file

    class Full:
        """A stream whose write fails after a part, while `append` waits."""

        def write(self, record: bytes) -> int:
            append.start()
            append.join(0.2)
            return stream.write(record[:10])

        def __getattr__(self, name: str) -> object:
            return getattr(stream, name)

    monkeypatch.setattr(file.file, "file", Full())
    file.write(SKIPPED)
    append.join()
    monkeypatch.undo()
    file.close()
    assert read_events(tmp_path) == [stall, SKIPPED]
