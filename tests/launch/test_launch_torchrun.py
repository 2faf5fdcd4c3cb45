"""launch/torchrun.sh: arguments, exit codes, signals, and killed launchers."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE_S, has_ended, wait_until
from runs.command import (
    ROOT,
    command_line,
    descendants,
    overrides_of,
    prepared_corpus,
    steps_logged,
    wait_for,
)
from runs.json_files import read_json

SCRIPT = ROOT / "launch" / "torchrun.sh"
AWKWARD = [
    "attention=diff_v2",
    "run.name=a b  c",
    "data.sample_prompt='it''s \"quoted\"'",
    "data.paths=[a.txt,'b c.txt',*.jsonl]",
    "++x={a:1,b:[${seed},$HOME,`id`,$(id)]}",
    "~y",
    "z=\\ \ttab*?[a-z]!#;&|<>",
    "empty=",
    "",
    "-m",
]


def environment_with(path: Path, **variables: str) -> dict[str, str]:
    """Return this environment without launcher variables, with `path` first in PATH."""
    own = ("NNODES", "MAX_RESTARTS", "NPROC_PER_NODE", "RDZV_ENDPOINT", "RDZV_ID", "LOCAL_ADDR",
           "RUN_DIR")  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name not in own}
    found = f"{path}:{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": found, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def fake(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    file = directory / name
    file.write_text(f"#!{sys.executable}\n{script}", encoding="utf-8")
    file.chmod(0o755)


RECORD = "import json, os, sys; json.dump(sys.argv[1:], open(os.environ['SEEN'], 'w'))\n"


def recorded_call(tmp_path: Path, script: Path, words: list[str], **variables: str) -> list[str]:
    fake(tmp_path / "bin", "torchrun", RECORD)
    seen = tmp_path / "seen.json"
    env = environment_with(tmp_path / "bin", SEEN=str(seen), **variables)
    subprocess.run([script, *words], env=env, cwd=tmp_path, check=True, timeout=PATIENCE_S)
    return read_json(seen)


@pytest.mark.parametrize("script", sorted((ROOT / "launch").glob("*.s[hb]*")), ids=lambda p: p.name)
def test_launch_scripts_have_valid_syntax(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", "--severity=warning", script], check=True)


@pytest.mark.parametrize("variables", [{}, {"NNODES": "2", "RDZV_ENDPOINT": "node1:29400"}])
def test_torchrun_script_passes_config_overrides_unchanged(tmp_path, variables):
    (tmp_path / "trap.jsonl").touch()  # An unquoted * would expand to this name.
    seen = recorded_call(tmp_path, SCRIPT, AWKWARD, **variables)
    assert seen[seen.index("train") + 1 :] == AWKWARD


def test_torchrun_script_uses_rendezvous_endpoint_only_for_several_nodes(tmp_path):
    one = recorded_call(tmp_path, SCRIPT, [])
    assert one[:3] == ["--standalone", "--nproc-per-node=auto", "--max-restarts=0"]
    assert one[3:] == ["-m", "diffllm", "train"]
    many = recorded_call(
        tmp_path, SCRIPT, [], NNODES="1:4", RDZV_ENDPOINT="n1:29400", RDZV_ID="job 7",
        NPROC_PER_NODE="8", MAX_RESTARTS="10", LOCAL_ADDR="10.0.0.2",
    )  # fmt: skip
    assert "--standalone" not in many
    assert {
        "--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400", "--rdzv-id=job 7",
        "--nproc-per-node=8", "--max-restarts=10", "--local-addr=10.0.0.2",
    } <= set(many)  # fmt: skip


@pytest.mark.parametrize(
    ("script", "installed", "message"),
    [
        ("torchrun.sh", True, "error: NNODES=2 needs RDZV_ENDPOINT=HOST:PORT"),
        ("torchrun.sh", False, "error: torchrun is not in PATH; activate"),
        ("slurm.sbatch", False, "submit it: sbatch {script} a\\ b=1"),
    ],
)
def test_script_starts_no_process_if_requirement_is_missing(tmp_path, script, installed, message):
    seen, script = tmp_path / "seen", SCRIPT.with_name(script)
    for name in ["srun", *["torchrun"] * installed]:
        fake(tmp_path / "bin", name, RECORD)
    env = environment_with(tmp_path / "bin", NNODES="2", SEEN=str(seen))
    env["PATH"] = f"{tmp_path / 'bin'}:/usr/bin:/bin"  # Hides the installed torchrun.
    words = ["bash", script, "a b=1"]
    done = subprocess.run(words, env=env, capture_output=True, encoding="utf-8", timeout=PATIENCE_S)
    assert done.returncode == 2
    assert message.format(script=script) in done.stderr
    assert done.stderr.count("\n") == 1
    assert not seen.exists()


@pytest.mark.parametrize(
    ("code", "marker", "named", "expected"),
    [
        (0, True, True, 75),
        (0, True, False, 0),
        (0, False, True, 0),
        (1, True, True, 1),
        (143, False, True, 143),
    ],
)
def test_torchrun_script_returns_75_only_if_marker_exists(tmp_path, code, marker, named, expected):
    fake(tmp_path / "bin", "torchrun", f"{RECORD}raise SystemExit({code})\n")
    run, seen = tmp_path / "a run", tmp_path / "seen"
    run.mkdir()
    if marker:
        (run / "requeue").touch()
    variables = {"RUN_DIR": str(run)} if named else {}
    env = environment_with(tmp_path / "bin", SEEN=str(seen), **variables)
    done = subprocess.run([SCRIPT, "seed=1"], env=env, timeout=PATIENCE_S)
    assert done.returncode == expected
    given = read_json(seen)
    assert given[given.index("train") + 1 :] == [f"run.dir={run}"] * named + ["seed=1"]


def start_process(words: list[str], **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [str(word) for word in words],
        env=environment_with(Path("/nowhere"), **variables),
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        start_new_session=True,
    )


def finished_output(process: subprocess.Popen, code: int = 0) -> str:
    """Return the output of a process that exits with `code`; kill its process tree at a timeout."""
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        for pid in [process.pid, *descendants(process.pid)] if process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == code, output
    return output


SMALL = ("seq_len=32", "model.n_layers=1", "log_interval=1", "steps=100000")
"""A long run whose steps take milliseconds."""


@pytest.mark.slow
def test_workers_save_checkpoint_after_signal_to_torchrun_script(tmp_path):
    """The run is stopped by each signal in turn, and resumed."""
    corpus, run = prepared_corpus(tmp_path), tmp_path / "run"
    last = 0
    stops = ((signal.SIGTERM, "1", 0), (signal.SIGUSR1, "1", 0), (signal.SIGINT, "2", 130))
    for number, ranks, code in stops:
        words = overrides_of(corpus, run, *SMALL)
        process = start_process([SCRIPT, *words], NPROC_PER_NODE=ranks)
        wait_for(lambda: steps_logged(run)[last:], process, f"step after {last}")  # noqa: B023
        process.send_signal(number)
        output = finished_output(process, code)
        assert f"stopped by {number.name} after step" in output
        assert "Traceback" not in output
        assert (run / "requeue").exists() == (number != signal.SIGINT)
        last = steps_logged(run)[-1]
        assert steps_logged(run) == list(range(1, last + 1))
        assert (run / "checkpoints" / f"step-{last:08d}" / "state.json").exists()


def test_torchrun_ends_if_script_receives_signal_before_workers_start(tmp_path):
    """For example during the wait for other nodes."""
    waiting = "import os, time; open(os.environ['SEEN'], 'w').close(); time.sleep(3600)\n"
    fake(tmp_path / "bin", "torchrun", waiting)
    seen = tmp_path / "seen"
    env = environment_with(tmp_path / "bin", SEEN=str(seen))
    process = subprocess.Popen([SCRIPT], env=env, stdout=subprocess.PIPE, encoding="utf-8")
    wait_for(seen.exists, process, "torchrun")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_worker_processes_end_if_torchrun_is_killed(tmp_path):
    corpus, run = prepared_corpus(tmp_path), tmp_path / "run"
    process = start_process(command_line(corpus, run, *SMALL, ranks=2))
    wait_for((run / "metrics.jsonl").exists, process, "first step")
    below = descendants(process.pid)
    assert len(below) >= 2
    process.kill()
    process.wait()
    wait_until(lambda: all(map(has_ended, below)), "end of the workers")
