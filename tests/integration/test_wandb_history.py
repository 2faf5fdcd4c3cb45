"""History of runs on a stand-in for wandb's server: each step once, after kills and resumes."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import planted_train
from runs.command import PERF, ForkedRun, Gate, metrics, overrides_of, start, tool
from runs.json_files import read_json
from runs.planted_train import Fault
from wandb_server import HISTORY, StoredRun, WandbServer

from diffllm.metrics import wandb_run

pytestmark = pytest.mark.slow
SMALL = ("seq_len=32", "global_batch_size=2", "data.num_workers=0", "eval.sequences=1")
STEPS = (*SMALL, "steps=30", "log_interval=1", "eval.interval=7", "checkpoint.interval=5")
ONLINE, OFFLINE = (*STEPS, "wandb.mode=online"), (*STEPS, "wandb.mode=offline", "log_interval=4")
OTHER_RATE = ("optim.lr=1e-4", "run.allow_changes=[optim.lr]")


def sync(output: str) -> None:
    """Run the `wandb sync` command that a run has printed."""
    (command,) = set(re.findall("`wandb (sync .*?)`", output))
    line = f"{shlex.quote(sys.executable)} -m wandb {command}"
    subprocess.run(line, shell=True, check=True, capture_output=True)


def as_logged(run: StoredRun) -> list[dict[str, Any]]:
    """Return the lines on the server, without wandb's keys and measured times."""
    for line in run.history:
        assert line["_step"] == line["step"]
    return [without_times(line) for line in run.history]


def recorded_steps(run: Path) -> list[dict[str, Any]]:
    """Return the values of each step in steps.npy and metrics.jsonl, without measured times."""
    rows = np.load(run / "steps.npy")
    lines = {line["step"]: line for line in metrics(run)}
    steps = [dict(zip(rows.dtype.names, row.tolist(), strict=True)) for row in rows]
    return [without_times({**step, **lines.get(step["step"], {})}) for step in steps]


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(("_", *PERF))}


def assert_unfinished(stored: StoredRun, step: int) -> None:
    """Check that a run which was killed before `step` has the uploaded steps once."""
    steps = [line["step"] for line in stored.history]
    assert steps in ([*range(1, step - 1)], [*range(1, step)])


def wandb_id(run: Path) -> str:
    return read_json(run / "run.json")["wandb_id"]


def assert_history_complete(server: WandbServer, run: Path, first: int = 1) -> None:
    """Check that the wandb run of `run` has the steps from `first` to 30, each once."""
    lines = recorded_steps(run)
    assert [line["step"] for line in lines] == list(range(first, 31))
    assert as_logged(server.runs[wandb_id(run)]) == lines


def run_until(
    server: WandbServer, corpus: Path, run: Path, step: int, *words: str, number: int | None = None
) -> str:
    """Start a run and stop it before `step` with a signal (default: SIGKILL); return its output.

    A killed run has saved its last checkpoint, and has uploaded the steps before `step` - 1 if
    online: wandb keeps the last line until the next step.
    """
    gate = Gate(run, step)
    process = start(corpus, run, *words)
    if number:
        return process.stop_at(gate, number)
    process.wait_for(gate.reached, "gate")
    if "wandb.mode=online" in words and not server.away:
        stored = server.runs[wandb_id(run)]
        process.wait_for(lambda: len(stored.history) >= step - 2, "upload")
    saved = (step - 1) // 5 * 5
    process.kill_at(gate, run / f"checkpoints/step-{saved:08}" if saved else None)
    return process.text()


KILLS = (None, None, None)
SIGNALS = (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1)


@pytest.mark.parametrize(
    ("mode", "numbers"),
    [
        ("online", KILLS),
        ("online", SIGNALS),
        ("offline", (None, signal.SIGUSR1, None)),
        ("synced between", KILLS),
        ("then online", KILLS),
    ],
)
def test_history_has_each_step_once_after_three_stops(server, corpus, tmp_path, mode, numbers):
    """The first kill precedes the first checkpoint; SIGUSR1 lets a scheduler requeue the run."""
    run = tmp_path / "run"
    words = ONLINE if mode == "online" else OFFLINE
    for step, number in zip((3, 17, 24), numbers, strict=True):
        output = run_until(server, corpus, run, step, *words, number=number)
        if mode == "synced between" and step == 17:
            sync(output)
    if words == OFFLINE:
        # wandb writes the first record after a second; `wandb sync` refuses an earlier file.
        (file,) = run.glob("wandb/offline-run-*/*.wandb")
        file.write_bytes(file.read_bytes()[:7])
    output = start(corpus, run, *(ONLINE if mode == "then online" else words)).finish()
    if mode in ("offline", "synced between"):
        sync(output)
    assert len(server.runs) == 1
    assert_history_complete(server, run)


@pytest.mark.parametrize("earlier_steps", [0, 16])
def test_offline_run_has_all_steps_if_server_is_away_at_start(
    server, corpus, tmp_path, monkeypatch, earlier_steps
):
    """A resumed start gets a new wandb run, because the server cannot tell its last step."""
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    run = tmp_path / "run"
    if earlier_steps:
        run_until(server, corpus, run, earlier_steps + 1, *ONLINE)
    server.away = True
    run_until(server, corpus, run, 18, *ONLINE)
    offline_id = wandb_id(run)
    output = start(corpus, run, *ONLINE).finish()
    assert wandb_id(run) == offline_id
    assert "wandb cannot go online, the run is recorded offline: " in output
    server.away = False
    sync(output)
    assert_history_complete(server, run)
    others = [stored for name, stored in server.runs.items() if name != wandb_id(run)]
    assert len(others) == bool(earlier_steps)
    for stored in others:
        assert_unfinished(stored, earlier_steps + 1)


def test_offline_start_of_online_run_begins_new_wandb_run(server, corpus, tmp_path):
    run = tmp_path / "run"
    run_until(server, corpus, run, 17, *ONLINE)
    first = wandb_id(run)
    run_until(server, corpus, run, 24, *OFFLINE)
    output = start(corpus, run, *OFFLINE).finish()
    sync(output)
    assert_history_complete(server, run)
    assert set(server.runs) == {first, wandb_id(run)}
    assert_unfinished(server.runs[first], 17)


def test_run_uploads_steps_of_time_without_server(server, corpus, tmp_path):
    run = tmp_path / "run"
    gates = [Gate(run, step) for step in (8, 24)]
    process = start(corpus, run, *ONLINE)
    process.wait_for(gates[0].reached, "gate")
    server.away = True
    gates[0].open()
    process.wait_for(gates[1].reached, "gate")
    process.wait_for(lambda: server.refused, "refused request")
    server.away = False
    gates[1].open()
    process.finish()
    assert_history_complete(server, run)


@pytest.mark.parametrize("step", [4, 17])
def test_resume_with_changed_settings_begins_new_wandb_run(server, corpus, tmp_path, step):
    """The new wandb run stays in use after a kill before the next checkpoint."""
    run = tmp_path / "run"
    run_until(server, corpus, run, step, *ONLINE)
    first = wandb_id(run)
    output = run_until(server, corpus, run, step + 1, *ONLINE, *OTHER_RATE)
    saved = (step - 1) // 5 * 5
    assert f"because wandb cannot replace the steps after {saved} of run {first}" in output
    second = wandb_id(run)
    output = start(corpus, run, *ONLINE, *OTHER_RATE).finish()
    assert "cannot replace" not in output
    assert set(server.runs) == {first, second}
    assert wandb_id(run) == second != first
    assert_unfinished(server.runs[first], step)
    assert_history_complete(server, run)


def test_resume_after_repair_continues_newest_wandb_run(server, corpus, tmp_path):
    run = tmp_path / "run"
    run_until(server, corpus, run, 17, *ONLINE)
    former = server.runs[wandb_id(run)]
    former.files[HISTORY] = damaged = former.files[HISTORY][:3]
    for _ in range(2):
        done = tool(["wandb", f"run={run}", "mode=online", "--json"], tmp_path, dict(os.environ))
        (repaired,) = json.loads(done.out)["runs"]
    start(corpus, run, *ONLINE).finish()
    assert wandb_id(run) == repaired["id"]
    assert_history_complete(server, run)
    assert former.files[HISTORY] == damaged
    assert len(server.runs) == 3


def main_without_wait(fault: Fault, words: list[str]) -> int:
    wandb_run.START_SECONDS = 0
    return planted_train.main(fault, words)


def test_late_refusal_of_wandb_records_id_of_offline_run(server, corpus, tmp_path, monkeypatch):
    """wandb/ of the online start is deleted; the server refuses after the wait for wandb."""
    run = tmp_path / "run"
    run_until(server, corpus, run, 17, *ONLINE)
    online_id = wandb_id(run)
    shutil.rmtree(run / "wandb")
    server.away = True
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    words = overrides_of(corpus, run, *ONLINE)
    output = ForkedRun(words, main=main_without_wait).finish()
    assert wandb_id(run) != online_id
    server.away = False
    sync(output)
    assert_history_complete(server, run)


def test_resume_from_checkpoint_of_other_run_has_own_history(server, corpus, tmp_path):
    """The other run keeps its history, also if the new run is killed before its checkpoint."""
    source, run = tmp_path / "source", tmp_path / "run"
    run_until(server, corpus, source, 17, *ONLINE)
    words = (*ONLINE, f"resume={source}@10")
    gate = Gate(run, 13)
    process = start(corpus, run, *words)
    process.kill_at(gate)
    start(corpus, run, *words).finish()
    assert_history_complete(server, run, first=11)
    assert set(server.runs) == {wandb_id(source), wandb_id(run)}
    assert_unfinished(server.runs[wandb_id(source)], 17)
