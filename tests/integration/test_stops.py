"""Signals of a scheduler: every rank stops at one step, saved, and a marker asks to go on."""

import json
import signal
import subprocess
import sys

import pytest
from runs.command import (
    ROOT,
    ForkedRun,
    Gate,
    assert_same_weights,
    finish,
    metric_lines,
    overrides_of,
    trained_on,
)
from runs.planted_train import Fault
from tiers import slow_but


@pytest.mark.parametrize(
    ("number", "rank", "marked"),
    slow_but(
        [(signal.SIGUSR1, 1, True)],
        [(signal.SIGUSR1, 1, True), (signal.SIGTERM, 0, True), (signal.SIGINT, 0, False)],
    ),
)
def test_a_signal_to_one_rank_stops_all_at_one_step(corpus, tmp_path, number, rank, marked):
    run = tmp_path / "run"
    words = [*overrides_of(corpus, run), "steps=60", "log_interval=1", "checkpoint.interval=1000"]
    said = ForkedRun(words, 2, run).stop_at(Gate(run, 4), number, rank)
    assert f"stopped by {number.name} after step" in said
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


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2]))
def test_a_signal_before_the_first_step_asks_to_go_on(corpus, tmp_path, ranks):
    """To rank 0, while it looks at checkpoints and others wait for it."""
    run = tmp_path / "run"
    words = [*overrides_of(corpus, run), "steps=6"]
    process = ForkedRun(words, ranks, run, Fault("slow claim", 0))
    process.wait_for((run / ".lock").exists, "claim")
    process.signal(signal.SIGUSR1, 0)
    output = process.finish()
    assert "stopped by SIGUSR1 before the first step" in output
    assert "Traceback" not in output
    assert json.loads((run / "requeue").read_text()) == {"signal": "SIGUSR1", "step": None}


@pytest.mark.slow
def test_killed_during_a_save_a_run_becomes_what_it_would_have_been(corpus, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    words = ("steps=12", "optim.warmup_steps=1", "checkpoint.interval=4", "log_interval=1")
    finish(corpus, straight, *words)
    first = ForkedRun([*overrides_of(corpus, broken), *words], fault=Fault("endless second save"))
    half_made = broken / "checkpoints" / ".step-00000008.incomplete"
    first.wait_for(half_made.is_dir, "save")
    first.kill()
    assert "continues after step 4" in finish(corpus, broken, *words)
    assert metric_lines(broken) == metric_lines(straight)
    assert_same_weights(straight, broken, 12)
    a, b = ({key: set(seen) for key, seen in trained_on(x).items()} for x in (broken, straight))
    assert a == b


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_again_and_again_a_run_becomes_what_it_would_have_been():
    """A short version of the benchmark, on one rank, with torchrun restarting it."""
    words = ["--kills", "3", "--saves", "1", "--ranks", "1", "--every", "4"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *words],
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["equal"]
    assert result["kills"] >= 3
    assert result["during_a_save"] >= 1
    assert result["steps_made_again"] >= 1
