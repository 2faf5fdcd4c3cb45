"""Sweeps that are killed, stopped and resumed, on this machine and through submitit."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock
from processes import PATIENCE_S
from runs.command import Result, command, descendants, metrics, success_of, train_command, wait_for
from runs.json_files import read_json

STEPS = 40
LONGER = [f"steps={STEPS}", "checkpoint.interval=4", "log_interval=4"]


def start_sweep(words: list[str], cwd: Path, environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        train_command(words), cwd=cwd, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", start_new_session=True,
    )  # fmt: skip


def process_of_run(process: subprocess.Popen, name: str) -> int:
    for pid in descendants(process.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if f"run.name={name}".encode() in words and b"diffllm" in words:
                return pid
    raise AssertionError(f"no process of {name}")


def has_saved(run: Path) -> bool:
    return any(run.glob("checkpoints/step-*/state.json"))


def start_time(run: Path) -> int:
    return (run / "run.json").stat().st_mtime_ns


def assert_finished(run: Path) -> None:
    assert read_json(run / "summary.json")["steps"] == STEPS
    steps = [line["step"] for line in metrics(run)]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS


@pytest.mark.slow
def test_killed_sweep_resumes_unfinished_runs(tmp_path, tiny, environment, finished_run):
    words = ["-m", "attention=standard,diff_v2", *tiny, *LONGER, "run.sweep=mine"]
    runs = [tmp_path / "outputs" / "mine" / name for name in ("standard", "diff_v2")]

    sweep = start_sweep(words, tmp_path, environment)
    wait_for(lambda: has_saved(runs[0]), sweep, "checkpoint")
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.communicate()
    with FileLock(runs[0] / ".lock", timeout=PATIENCE_S):  # the run saves and stops
        assert not (runs[0] / "summary.json").exists()

    before = start_time(runs[0])
    sweep = start_sweep(words, tmp_path, environment)
    wait_for(lambda: start_time(runs[0]) > before, sweep, "second start")
    os.kill(process_of_run(sweep, "standard"), signal.SIGKILL)
    output = sweep.communicate(timeout=PATIENCE_S)[0]
    assert sweep.returncode == 1, output
    assert re.search(r"^run 1 of 2: standard$", output, re.M), output
    assert re.search(r"^run 2 of 2: diff_v2$", output, re.M), output
    failed = re.search(r"^outputs/mine/standard +FAILED, killed by SIGKILL", output, re.M)
    assert failed, output
    table = output[failed.start() :]
    assert re.search(r"^ +log outputs/mine/standard.log$", table, re.M), table
    assert re.search(r"^outputs/mine/diff_v2 +held-out loss \d", table, re.M), table
    assert "1 of 2 runs did not finish, 1 failed" in table
    assert_finished(runs[1])

    last = success_of(command(train_command(words), tmp_path, environment))
    assert "sweep outputs/mine: 2 runs, 1 already finished" in last.out
    assert re.search(r"^outputs/mine/standard resumes from step \d+$", last.out, re.M), last.out
    assert "run 2 of 2" not in last.out
    assert_finished(runs[0])


@pytest.mark.slow
def test_sweep_reports_finished_runs_and_starts_no_other_run_after_ctrl_c(
    tmp_path, tiny, environment, finished_run
):
    words = ["-m", *tiny, *LONGER, "steps=8,5000,6000", "run.sweep=mine", "wandb.mode=offline"]
    sweep = start_sweep(words, tmp_path, environment)
    run = tmp_path / "outputs" / "mine" / "steps5000"
    wait_for(lambda: has_saved(run), sweep, "checkpoint")
    os.killpg(sweep.pid, signal.SIGINT)
    output = sweep.communicate(timeout=PATIENCE_S)[0]
    assert sweep.returncode == 130, output
    assert not re.search("Traceback|SIGTERM", output)
    assert output.count("stopping after this step") == output.count("stopped by SIGINT") == 1
    begun = r"^run 2 of 3: steps5000\n2 runs left, ETA [\d:]+ \(at the"
    assert re.search(begun, output, re.M), output
    assert re.search(r"^outputs/mine/steps8 +held-out loss \d", output, re.M), output
    stopped = r"^outputs/mine/steps5000 +stopped, saved at step \d+ of"
    assert re.search(stopped, output, re.M), output
    assert re.search(r"^outputs/mine/steps6000 +not started$", output, re.M), output
    assert "2 of 3 runs did not finish; the same command with run.sweep=mine" in output
    assert "\ncomparison outputs/mine/report.html, outputs/mine/report.csv\n" in output
    assert (tmp_path / "outputs" / "mine" / "report.html").is_file()
    (upload,) = [line for line in output.splitlines() if "wandb sync" in line]
    assert "`wandb sync outputs/mine/*/wandb/offline-run-*` uploads all runs" in upload


@pytest.mark.slow
def test_submitit_sweep_on_two_ranks_reports_failed_run(tmp_path, tiny, environment, finished_run):
    obstacle = tmp_path / "outputs" / "mine" / "seed1"
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("in the way", encoding="utf-8")
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"]
    words = ["-m", "seed=0,1", *tiny, *launcher, "run.sweep=mine"]
    result: Result = command(train_command(words), tmp_path, environment)
    assert result.code == 1, result
    assert re.search(r"^outputs/mine/seed0 +held-out loss \d", result.out, re.M), result.out
    reason = "exit status 2: run directory outputs/mine/seed1 cannot be written"
    assert re.search(rf"^outputs/mine/seed1 +FAILED, {reason}", result.out, re.M), result.out
    assert "Traceback" not in result.out + result.err
    run = tmp_path / "outputs" / "mine" / "seed0"
    facts = read_json(run / "run.json")
    assert (facts["ranks"], facts["wandb_group"]) == (2, "diff_v2")
    assert facts["environment"]["variables"]["DIFFLLM_WANDB_NAME"] == "seed0"
    assert [line["step"] for line in metrics(run)][-1] == 4
    logs = list((obstacle.parent / ".submitit").glob("*/*_log.out"))
    assert any("2 x CPU" in log.read_text(encoding="utf-8") for log in logs)
