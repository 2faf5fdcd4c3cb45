"""launch/slurm.sbatch: its srun command, and requeueing."""

import subprocess
from pathlib import Path

import pytest
from processes import PATIENCE_S
from runs.command import ROOT
from runs.json_files import read_json
from test_launch_torchrun import AWKWARD, environment_with, fake

SCRIPT = ROOT / "launch" / "slurm.sbatch"
SRUN = """
import json, os, pathlib, sys
json.dump(sys.argv[1:], open("srun.json", "w"))
words = [w for w in sys.argv if w.startswith("run.dir=")]
run = pathlib.Path(words[-1].removeprefix("run.dir="))
run.mkdir(parents=True, exist_ok=True)
if os.environ["MARKER"]:
    (run / "requeue").touch()
sys.exit(int(os.environ["CODE"]))
"""
SQUEUE = "import os; print(os.environ['STATE'])\n"
SCONTROL = "import json, sys; json.dump(sys.argv[1:], open('scontrol.json', 'w'))\n"


def job_calls(
    directory: Path, *words: str, code: int = 0, marker: bool = False, state: str = "RUNNING"
):
    """Run the script as job 77; return its exit code, and the arguments of srun and scontrol."""
    for name, script in (("srun", SRUN), ("squeue", SQUEUE), ("scontrol", SCONTROL)):
        fake(directory / "bin", name, script)
    env = environment_with(
        directory / "bin", SLURM_JOB_ID="77", CODE=str(code), MARKER="1" * marker, STATE=state
    )
    done = subprocess.run(["bash", SCRIPT, *words], env=env, cwd=directory, timeout=PATIENCE_S)
    asked = directory / "scontrol.json"
    scontrol = read_json(asked) if asked.exists() else None
    return (done.returncode, read_json(directory / "srun.json"), scontrol)


def test_slurm_script_passes_config_overrides_unchanged(tmp_path):
    (tmp_path / "trap.jsonl").touch()  # An unquoted * would expand to this name.
    code, srun, _ = job_calls(tmp_path, *AWKWARD)
    assert code == 0
    begin = ["--kill-on-bad-exit=1", "python", "-m", "diffllm", "train"]
    assert srun == [*begin, "run.dir=outputs/slurm-77", *AWKWARD]


@pytest.mark.parametrize(
    ("code", "marker", "state", "requeued"),
    [
        (0, True, "RUNNING", True),
        (0, False, "RUNNING", False),  # Finished, or stopped by Ctrl-C.
        (1, False, "RUNNING", False),
        (1, True, "RUNNING", False),  # Failed after an earlier stop.
        (0, True, "COMPLETING", False),  # Cancelled by scancel.
        (0, True, "", False),
    ],
)
def test_slurm_script_requeues_job_only_if_marker_exists(tmp_path, code, marker, state, requeued):
    exit_code, _, scontrol = job_calls(tmp_path, code=code, marker=marker, state=state)
    assert exit_code == code
    assert scontrol == (["requeue", "77"] if requeued else None)


def test_slurm_script_finds_requeue_marker_in_custom_run_directory(tmp_path):
    words = ["attention=gated", "run.dir=elsewhere/a b", "seed=1"]
    _, srun, scontrol = job_calls(tmp_path, *words, marker=True)
    assert srun[-3:] == words
    assert scontrol == ["requeue", "77"]
