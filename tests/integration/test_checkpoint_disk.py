"""Runs on full disks, with real files and real processes."""

import contextlib
import os
import resource
import signal
from pathlib import Path

import pytest
from runs.command import Gate, finish, metric_lines, start, the_error

from diffllm.checkpoint.directory import list_checkpoints, step_of
from diffllm.checkpoint.manifest import verify

LAST = 24
WORDS = (f"steps={LAST}", "checkpoint.interval=4", "log_interval=1", f"eval.interval={LAST}")
TOO_SMALL = 1_000_000
"""Maximum bytes of a file. A checkpoint's tensors need seven times as many, other files a tenth."""


def limit_files(pid: int, size: int) -> None:
    """Make writes of a process fail with EFBIG if a file would exceed `size` bytes."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def steps(run: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run / "checkpoints")]


def warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("warning: ")]


def assert_clean(run: Path, output: str) -> None:
    assert "Traceback" not in output
    assert list((run / "checkpoints").glob(".*")) == []
    for path in list_checkpoints(run / "checkpoints"):
        assert verify(path) == [], path


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_continues_if_checkpoint_exceeds_file_size_limit(corpus, tmp_path, ranks):
    """With two ranks, only the last rank has the limit."""
    run = tmp_path / "run"
    gates = [Gate(run, 6), Gate(run, 16)]
    process = start(corpus, run, *WORDS, ranks=ranks)
    process.wait_for(lambda: steps(run) == [4], "first checkpoint")
    limit_files(process.pid(ranks - 1), TOO_SMALL)
    gates[0].open()
    process.wait_for(gates[1].reached, "two more saves")
    assert steps(run)[0] == 4, "older checkpoints are gone"
    limit_files(process.pid(ranks - 1), resource.RLIM_INFINITY)
    gates[1].open()
    output = process.finish()
    said = warnings(output)
    assert said
    for line in said:
        assert "could not be saved under" in line
        assert f"rank {ranks - 1}: File too large" in line
        assert "the newest checkpoint is step-" in line
        assert line.endswith("training continues")
    assert [line["step"] for line in metric_lines(run)] == list(range(1, LAST + 1))
    assert steps(run)[-1] == LAST
    assert_clean(run, output)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the last step", "a signal"])
def test_run_ends_with_error_if_last_checkpoint_cannot_be_saved(corpus, tmp_path, how):
    run = tmp_path / "run"
    gate = Gate(run, 6)
    process = start(corpus, run, *WORDS)
    process.wait_for(lambda: steps(run), "first checkpoint")
    limit_files(process.pid(), TOO_SMALL)
    if how == "a signal":
        process.signal(signal.SIGTERM)
    gate.open()
    output = process.finish(2)
    error = the_error(output)
    assert f"could not be saved under {run}/checkpoints: rank 0: File too large" in error
    assert (f"error: step {LAST} " in error) == (how == "the last step")
    newest = list_checkpoints(run / "checkpoints")[-1]
    assert f"the newest checkpoint is {newest.name}; free disk space, then" in error
    assert step_of(newest) == 4
    assert_clean(run, output)
    assert not (run / "summary.json").exists()
    output = finish(corpus, run, *WORDS)
    assert f"resumes from step {step_of(newest)}" in output
    assert steps(run)[-1] == LAST


def test_training_continues_if_checkpoint_save_fails_on_full_disk(corpus, disk_of_24_mb):
    run, filler = disk_of_24_mb / "run", disk_of_24_mb / "filler"
    gates = [Gate(run, 6), Gate(run, 16)]
    process = start(corpus, run, *WORDS)
    process.wait_for(lambda: steps(run), "first checkpoint")
    process.wait_for(gates[0].reached, "step 6")
    filler.write_bytes(b"")
    with open(filler, "ab", buffering=0) as file:

        def full() -> bool:
            """Leave less space than a checkpoint needs, even if files were deleted meanwhile."""
            disk = os.statvfs(disk_of_24_mb)
            spare = disk.f_bavail * disk.f_frsize - 3_000_000
            if spare > 0:
                with contextlib.suppress(OSError):  # a save filled the disk first
                    file.write(bytes(spare))
            return spare <= 0

        process.wait_for(full, "full disk")
        gates[0].open()
        process.wait_for(lambda: full() and gates[1].reached(), "two more saves")
    assert steps(run), "older checkpoints are gone"
    filler.unlink()
    gates[1].open()
    output = process.finish()
    assert warnings(output)
    for line in warnings(output):
        assert " are free; the newest checkpoint is step-" in line or "No space left" in line
    assert [line["step"] for line in metric_lines(run)] == list(range(1, LAST + 1))
    assert steps(run)[-1] == LAST
    assert_clean(run, output)
