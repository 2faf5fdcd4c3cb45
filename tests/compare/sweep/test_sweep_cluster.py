"""Sweeps read SLURM's answers, here from stand-ins for its commands."""

import os
import stat
import sys

import pytest

from diffllm.compare.sweep.cluster import in_queue
from diffllm.core.errors import ConfigError


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Puts a squeue on PATH that prints, complains and exits as told."""

    def install(out, err, code):
        script = tmp_path / "squeue"
        body = f"sys.stdout.write({out!r}); sys.stderr.write({err!r}); sys.exit({code})"
        script.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.mark.parametrize(
    ("out", "err", "code", "there"),
    [
        ("7_0\n", "", 0, True),
        ("", "", 0, False),
        ("", "slurm_load_jobs error: Invalid job id specified\n", 1, False),
    ],
)
def test_a_job_is_in_the_queue_if_squeue_lists_it(squeue, out, err, code, there):
    squeue(out, err, code)
    assert in_queue("7_0") is there


def test_a_scheduler_that_does_not_answer_is_an_error_not_an_empty_queue(squeue):
    squeue("", "slurm_load_jobs error: Socket timed out\n", 1)
    with pytest.raises(ConfigError, match="Socket timed out"):
        in_queue("7_0")


def test_no_squeue_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="squeue cannot be run: No such file"):
        in_queue("7_0")
