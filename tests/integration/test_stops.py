"""Signals of a scheduler: every rank stops at one step, saved, and a marker asks to go on."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_runs import ForkedRun
from runs import (
    ROOT,
    command,
    finish,
    metric_lines,
    overrides_of,
    prepared_corpus,
    reached,
    start,
    wait_for,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with its tokens prepared."""
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("number", "rank", "marked"),
    [(signal.SIGUSR1, 1, True), (signal.SIGTERM, 0, True), (signal.SIGINT, 0, False)],
)
def test_a_signal_to_one_rank_stops_all_at_one_step(corpus, tmp_path, number, rank, marked):
    run = tmp_path / "run"
    words = [*overrides_of(corpus, run), "steps=60", "log_interval=1", "checkpoint.interval=1000"]
    first = ForkedRun(words, 2, run)
    first.wait_for(lambda: reached(run, 3), "step 3")
    first.signal(number, rank)
    assert f"stopped by {number.name} after step" in first.finish()
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert metric_lines(run)[-1]["step"] == step < 60
    marker = run / "requeue"
    assert marker.exists() == marked
    if marked:
        assert json.loads(marker.read_text()) == {"signal": number.name, "step": step}
    again = ForkedRun([*words, f"steps={step + 2}", "run.allow_changes=[steps]"], 2, run)
    assert f"continues after step {step}" in again.finish()
    assert not marker.exists()


def test_a_finished_run_does_not_ask_to_go_on(corpus, tmp_path):
    run = tmp_path / "run"
    words = [*overrides_of(corpus, run), "steps=2", "optim.warmup_steps=1"]
    ForkedRun(words, 1, run).finish()
    (run / "requeue").write_text("{}")  # left behind by something else
    assert "is finished" in ForkedRun(words, 1, run).finish()
    assert not (run / "requeue").exists()


def test_a_signal_before_the_first_step_asks_to_go_on(corpus, tmp_path):
    run = tmp_path / "run"
    process = start(command(corpus, run, "steps=6"))
    status, mask = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGUSR1 - 1)
    wait_for(
        lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & mask,
        process,
        "handler",
    )
    process.send_signal(signal.SIGUSR1)
    output = finish(process)
    assert "stopped by SIGUSR1 before the first step" in output
    assert "Traceback" not in output
    assert json.loads((run / "requeue").read_text()) == {"signal": "SIGUSR1", "step": None}


def test_killed_again_and_again_a_run_becomes_what_it_would_have_been():
    """A short version of the benchmark, on one rank, with torchrun restarting it."""
    words = ["--kills", "3", "--saves", "1", "--ranks", "1", "--every", "4"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *words],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["equal"]
    assert result["kills"] >= 3
    assert result["during_a_save"] >= 1
    assert result["steps_made_again"] >= 1
