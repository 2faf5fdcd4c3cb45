"""Signals of a scheduler and Ctrl-C: all ranks save, stop at the same step and can resume."""

import json
import os
import signal
import subprocess
import sys

import pytest
from processes import PATIENCE_S
from runs.command import (
    ROOT,
    ForkedRun,
    Gate,
    assert_same_weights,
    command,
    finish,
    metric_lines,
    overrides_of,
    success_of,
    tool_command,
    train_command,
    trained_on,
)
from runs.json_files import read_json
from runs.planted_train import Fault
from tiers import slow_but

from diffllm import cli
from diffllm.core.run_files import list_checkpoints

FIRST = "stopping after this step; press Ctrl-C again to stop now\n"
# Short sleeps: Python handles a signal between print and a sleep only after the sleep.
SLEEP = """
import time
print("begun", flush=True)
while True:
    time.sleep(0.01)
"""
HANGING = """
import time
from diffllm.cli import {module}

def hang(words):
    print("begun", flush=True)
    while True:
        time.sleep(0.01)

{module}.{name}_command = hang
"""


@pytest.mark.parametrize(
    ("number", "rank", "marked"),
    slow_but(
        [(signal.SIGINT, 0, False)],
        [(signal.SIGUSR1, 1, True), (signal.SIGTERM, 0, True), (signal.SIGINT, 0, False)],
    ),
)
def test_signal_to_one_rank_stops_all_ranks_at_same_step(corpus, tmp_path, number, rank, marked):
    run = tmp_path / "run"
    words = overrides_of(corpus, run, "steps=60", "log_interval=1", "checkpoint.interval=1000")
    said = ForkedRun(words, 2, run).stop_at(Gate(run, 4), number, rank)
    assert f"stopped by {number.name} after step" in said
    assert said.count(FIRST) == (number == signal.SIGINT)
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert metric_lines(run)[-1]["step"] == step < 60
    marker = run / "requeue"
    assert marker.exists() == marked
    if marked:
        assert read_json(marker) == {"signal": number.name, "step": step}
    again = ForkedRun([*words, f"steps={step + 2}", "run.allow_changes=[steps]"], 2, run)
    assert f"resumes from step {step}" in again.finish()
    assert not marker.exists()


@pytest.mark.parametrize(
    ("interval", "saved"),
    [
        (2, "the newest checkpoint is {run}/checkpoints/step-00000002"),
        (1000, "no checkpoint is saved"),
    ],
)
def test_second_ctrl_c_stops_training_immediately(corpus, tmp_path, interval, saved):
    run = tmp_path / "run"
    gate = Gate(run, 4)
    words = overrides_of(corpus, run, "steps=60", f"checkpoint.interval={interval}")
    process = ForkedRun(words, 1, run)
    process.wait_for(gate.reached, "gate")
    process.wait_for(lambda: interval > 2 or list_checkpoints(run / "checkpoints"), "checkpoint")
    process.signal(signal.SIGINT)
    process.wait_for(lambda: process.text().endswith(FIRST), "first line")
    process.signal(signal.SIGINT)
    said = process.finish(130)
    assert said.endswith(f"{FIRST}stopped immediately; {saved.format(run=run)}\n")
    assert "Traceback" not in said


def run_command(_: Fault, words: list[str]) -> int:
    return cli.main(words)


@pytest.mark.parametrize("name", slow_but(["prepare"], ["prepare", "report"]))
def test_command_prints_single_line_after_ctrl_c(tmp_path, monkeypatch, name):
    module = cli.module_of_command(name).rpartition(".")[2]
    (tmp_path / "hanging.py").write_text(HANGING.format(module=module, name=name), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = ForkedRun([name, "plugins=[hanging]"], 1, tmp_path, main=run_command)
    process.wait_for(lambda: process.text() == "begun\n", "command")
    process.signal(signal.SIGINT)
    more = "; the same command resumes" * (name == "prepare")
    assert process.finish(130) == f"begun\ninterrupted{more}\n"


@pytest.mark.parametrize(
    "words",
    [train_command([]), tool_command(["train"]), [sys.executable, "-m", "diffllm", "count"]],
    ids=["train.py", "console script", "module"],
)
def test_ctrl_c_during_imports_prints_single_line(tmp_path, environment, words):
    (tmp_path / "torch.py").write_text(SLEEP, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        words,
        env={**environment, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S) == ("", "interrupted\n")
    assert process.returncode == 130


def test_train_command_removes_stale_requeue_marker_of_finished_run(corpus, tmp_path):
    run = tmp_path / "run"
    words = overrides_of(corpus, run, "steps=2", "optim.warmup_steps=1")
    ForkedRun(words, 1, run).finish()
    (run / "requeue").write_text("{}", encoding="utf-8")  # a stale marker
    assert "is finished" in ForkedRun(words, 1, run).finish()
    assert not (run / "requeue").exists()


def test_signal_before_first_step_writes_requeue_marker(corpus, tmp_path):
    """Rank 0 receives the signal while it searches checkpoints and other ranks wait."""
    run = tmp_path / "run"
    words = overrides_of(corpus, run, "steps=6")
    process = ForkedRun(words, 2, run, Fault("slow claim", 0))
    process.wait_for((run / ".lock").exists, "claim")
    process.signal(signal.SIGUSR1, 0)
    output = process.finish()
    assert "stopped by SIGUSR1 before the first step" in output
    assert "Traceback" not in output
    assert read_json(run / "requeue") == {"signal": "SIGUSR1", "step": None}


@pytest.mark.slow
def test_run_killed_during_checkpoint_save_resumes_bit_identically(corpus, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    words = ("steps=12", "optim.warmup_steps=1", "checkpoint.interval=4", "log_interval=1")
    finish(corpus, straight, *words)
    first = ForkedRun(overrides_of(corpus, broken, *words), fault=Fault("endless second save"))
    half_made = broken / "checkpoints" / ".step-00000008.incomplete"
    first.wait_for(half_made.is_dir, "save")
    first.kill()
    assert "resumes from step 4" in finish(corpus, broken, *words)
    assert metric_lines(broken) == metric_lines(straight)
    assert_same_weights(straight, broken, 12)
    a, b = ({key: set(seen) for key, seen in trained_on(x).items()} for x in (broken, straight))
    assert a == b


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_repeatedly_killed_run_resumes_bit_identically():
    """Run a short version of benchmarks/chaos.py on one rank."""
    words = ["--kills", "3", "--saves", "1", "--ranks", "1", "--every", "4"]
    words = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *words]
    result = json.loads(success_of(command(words, ROOT, os.environ, timeout=880)).out)
    assert result["equal"]
    assert result["kills"] >= 3
    assert result["during_a_save"] >= 1
    assert result["steps_made_again"] >= 1
