"""Alerts, the table of events and the tag `cancel` in wandb, with an injected clock."""

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import wandb
from processes import PATIENCE_S
from runs.json_files import read_json
from wandb_file import OfflineRun

from diffllm.core.errors import ConfigError
from diffllm.core.run_files import RunFile
from diffllm.metrics import alerts, wandb_events
from diffllm.metrics.alerts import LEVELS, QUIET_STEPS, SKIPS, Alerts
from diffllm.metrics.events import BatchPlace, Event
from diffllm.metrics.wandb_config import WandbConfig, WandbMode, check_wandb
from diffllm.metrics.wandb_events import MOST_ROWS, CancelTag, SentEvents
from diffllm.metrics.wandb_run import WandbRun

HOUR = 3600


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def spike(step: int, height: float | None = 9.0) -> Event:
    return Event("loss_spike", step, step, "spikes_detrended", value=6.25, height=height)


def skips(first: int, count: int) -> list[Event]:
    return [Event("skipped", step, step) for step in range(first, first + count)]


@pytest.mark.parametrize(
    ("events", "texts"),
    [
        ([spike(5), spike(5), spike(6)], ["step 5: loss 6.25 is a spike (spikes_detrended)"]),
        ([spike(5, height=-8.0)], []),
        (
            [Event("loss_spike", 5, 5, "spikes", math.nan, math.nan)],
            ["step 5: loss not finite is a spike (spikes)"],
        ),
        (skips(5, SKIPS - 1) + skips(5 + SKIPS, SKIPS - 1), []),
        (skips(5, SKIPS + 3), ["10 updates in a row were skipped up to step 14, loss not finite"]),
        ([Event("diverged", 20, 20, detail="no loss")], ["after step 20: no loss"]),
        ([Event("stall", 7, 7, detail="rank 1 is missing")], ["after step 7: rank 1 is missing"]),
        ([Event("restart", 7, 7), Event("grad_spike", 8, 8, "spikes", 9.0, 8.0)], []),
    ],
)
def test_alert_of_event_states_step_and_reason(events, texts):
    selection = Alerts(LEVELS, clock=Clock())
    sent = [alert for event in events if (alert := selection.select(event))]
    assert [alert.text for alert in sent] == texts
    assert all(len(alert.title) < 64 for alert in sent)  # the limit of wandb


@pytest.mark.parametrize("seed", range(3))
def test_random_events_cause_at_most_one_alert_per_kind_and_hour(seed):
    """Also, each event that qualifies causes an alert if the last alert is an hour old."""
    rng = np.random.default_rng(seed)
    clock, step = Clock(), 0
    selection = Alerts(LEVELS, clock=clock)
    sent: dict[str, list[float]] = {kind: [] for kind in LEVELS}
    spikes = [-QUIET_STEPS]
    for _ in range(2000):
        clock.now += float(rng.exponential(HOUR / 10))
        step += int(rng.exponential(QUIET_STEPS / 2))
        kind = str(rng.choice(["diverged", "stall", "loss_spike"]))
        event = spike(step) if kind == "loss_spike" else Event(kind, step, step, detail="why")
        qualifies = kind != "loss_spike" or step - spikes[-1] >= QUIET_STEPS
        if kind == "loss_spike":
            spikes.append(step)
        is_due = qualifies and (not sent[kind] or clock.now - sent[kind][-1] >= HOUR)
        assert (selection.select(event) is not None) == is_due
        if is_due:
            sent[kind].append(clock.now)
    assert min(len(sent[kind]) for kind in ("diverged", "stall", "loss_spike")) > 20


def test_alerts_key_selects_kinds_and_earlier_events_send_no_alert():
    selection = Alerts(["stall"], clock=Clock())
    assert selection.select(Event("diverged", 1, 1, detail="why")) is None
    assert selection.select(Event("stall", 1, 1, detail="why")) is not None
    resumed = Alerts(LEVELS, [spike(10), *skips(20, SKIPS - 1)], Clock())
    assert resumed.select(spike(30)) is None
    assert resumed.select(skips(20 + SKIPS - 1, 1)[0]) is not None


@pytest.mark.parametrize("mode", [WandbMode.offline, WandbMode.disabled])
def test_cancel_tag_and_unknown_alert_are_refused_with_fix(mode):
    with pytest.raises(
        ConfigError, match=rf"cancel_tag=true needs .* its mode is {mode.value}; run"
    ):
        check_wandb(WandbConfig(mode, cancel_tag=True))
    check_wandb(WandbConfig(WandbMode.online, cancel_tag=True))
    with pytest.raises(ConfigError, match=r"'spike' must be one of diverged, skipped, loss_spike"):
        WandbConfig(mode, alerts=["stall", "spike"]).validate()


def write_events(run: Path, events: list[Event], end: bytes = b"") -> None:
    run.mkdir(exist_ok=True)
    (run / RunFile.EVENTS).write_bytes(b"".join(event.line() for event in events) + end)


@pytest.mark.slow
def test_offline_run_has_table_of_newest_events_in_summary_but_no_alert(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    batch = BatchPlace("9da6", 0, 0, 32, "stream", {"a": [48, 56], "b": [0, 2]})
    events = [Event("skipped", step, 64 * step, batch=batch) for step in range(MOST_ROWS + 2)]
    events += [Event("stall", 2000, 128_000, detail="rank 1 is missing")]
    write_events(tmp_path / "run", events, end=b'{"kind": "skip')
    cfg = WandbConfig(WandbMode.offline, project="a-project")
    run = WandbRun(cfg, tmp_path / "run", "tiny", {}, None)
    run.log({"step": 1, "tokens": 64})
    run.add_event(events[-1])
    run.finish({"x": 1})
    offline = OfflineRun(tmp_path / "run")
    assert offline.history == [{"step": 1, "tokens": 64}]
    assert offline.of_kind("alert") == []
    assert offline.summary["events_omitted"] == 4
    table = offline.summary["events"]
    path = offline.path.parent / "files" / table["path"]
    content = read_json(path)
    assert content["columns"] == [
        "kind", "step", "tokens", "definition", "value", "height", "lr", "batch", "detail"
    ]  # fmt: skip
    rows = content["data"]
    assert [row[1] for row in rows] == [event.step for event in events[4:]]
    assert rows[0][7:] == ["a 48-55, b 0-1", ""]
    assert rows[-1][7:] == ["", "rank 1 is missing"]


class RecordedRun:
    """An online wandb run that records times of updates of its summary, and alerts."""

    offline, entity, project, id = False, "team", "p", "abc"

    def __init__(self, clock: Clock):
        self.clock, self.updates, self.alerts = clock, [], []
        self.summary = SimpleNamespace(update=lambda values: self.updates.append(clock.now))

    def alert(self, title: str, text: str, level: str, wait_duration: int) -> None:
        self.alerts.append((title, level, wait_duration))


def test_table_is_sent_after_first_event_then_hourly_and_at_end(tmp_path):
    clock = Clock()
    run: Any = RecordedRun(clock)
    write_events(tmp_path, [])
    sent = SentEvents(run, tmp_path, LEVELS, [], clock)
    write_events(tmp_path, [spike(1)])
    for minute in range(300):
        clock.now = 60.0 * minute
        if minute in (5, 20, 70, 200):
            sent.add(spike(minute))
        sent.update_table()
    sent.update_table(end=True)
    assert [now / 60 for now in run.updates] == [5, 65, 125, 200, 299]
    assert run.alerts == [("Loss spike", "WARN", alerts.INTERVAL_S)]
    (tmp_path / RunFile.EVENTS).unlink()
    (tmp_path / RunFile.EVENTS).mkdir()
    sent.update_table(end=True)
    assert len(run.updates) == 5


def test_event_during_replay_of_history_sends_alert(tmp_path, monkeypatch):
    """The first spike of the run is written while the thread sends the steps of earlier starts."""
    files = str(tmp_path / "x" / "files")
    remote = MagicMock(offline=False, resumed=False, step=0, id="abc", dir=files)
    monkeypatch.setattr(wandb, "init", lambda **_: remote)
    written = threading.Event()

    def history():
        written.wait(PATIENCE_S)
        yield {"step": 1, "tokens": 1}

    write_events(tmp_path, [Event("restart", 1, 1)])
    cfg = WandbConfig(WandbMode.offline, project="a-project")
    run = WandbRun(cfg, tmp_path, "tiny", {}, None, history=history())
    write_events(tmp_path, [Event("restart", 1, 1), spike(2)])
    run.add_event(spike(2))
    written.set()
    run.finish()
    assert [call.args[0] for call in remote.alert.call_args_list] == ["Loss spike"]


class Server:
    """A wandb.Api whose requests fail at some calls, and whose run has a tag from call 6 on."""

    def __init__(self, clock: Clock):
        self.clock, self.times = clock, []

    def request(self) -> None:
        self.times.append(self.clock.now)
        if len(self.times) in (1, 3, 5):
            raise ConnectionError("the server is away")

    def open(self, overrides: dict[str, str], timeout: int) -> "Server":
        self.request()
        return self

    def run(self, run_id: str) -> "Server":
        self.request()
        return self

    def load(self, force: bool) -> None:
        self.request()

    @property
    def tags(self) -> list[str]:
        return ["cancel"] if len(self.times) >= 6 else ["cancelled"]


def test_cancel_tag_is_requested_once_per_minute_and_failed_requests_are_ignored(monkeypatch):
    clock = Clock()
    server = Server(clock)
    monkeypatch.setattr(wandb, "Api", server.open)
    cancelled: list[float] = []
    tag = CancelTag(RecordedRun(clock), lambda: cancelled.append(clock.now), clock)
    for _ in range(1000):
        tag.check()
        clock.now += 1.0
    assert len(server.times) == 6
    assert cancelled == server.times[-1:]
    assert set(np.diff(server.times)) == {wandb_events.REQUEST_S}
