"""A full disk and a removed run directory, at the start and at the end of a run."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from runs.command import Gate, finish, metric_lines, start, the_error, train
from tiers import slow_but

from diffllm.checkpoint.directory import list_checkpoints

LAST = 8
WORDS = (f"steps={LAST}", "checkpoint.interval=2", "log_interval=1", f"eval.interval={LAST}")
PAGE = 4096


def fill(disk: Path, pages: int) -> Path:
    """Fill a disk except for `pages` pages; return the file that fills the disk."""
    filler = disk / "filler"
    found = os.statvfs(disk)
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        file.write(bytes(max(0, found.f_bavail * found.f_frsize - pages * PAGE)))
    return filler


@pytest.mark.parametrize(
    ("pages", "ranks"),
    slow_but([(0, 1)], [(p, ranks) for p in range(8) for ranks in (1, 2)]),
)
def test_resume_on_full_disk_fails_without_data_loss(corpus, disk_of_24_mb, pages, ranks):
    run = disk_of_24_mb / "run"
    start(corpus, run, *WORDS, ranks=ranks).stop_at(Gate(run, 4))
    before = (run / "metrics.jsonl").read_bytes()
    filler = fill(disk_of_24_mb, pages)
    again = start(corpus, run, *WORDS, ranks=ranks)
    assert set(again.codes()) == {2}, again.text()
    the_error(again.text())
    assert (run / "metrics.jsonl").read_bytes().startswith(before)
    filler.unlink()
    assert "resumes from step " in finish(corpus, run, *WORDS, ranks=ranks)
    assert [line["step"] for line in metric_lines(run)] == list(range(1, LAST + 1))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_completes_heldout_evaluation_that_failed_on_full_disk(corpus, disk_of_24_mb, ranks):
    run = disk_of_24_mb / "run"
    gate = Gate(run, "heldout")
    process = start(corpus, run, *WORDS, ranks=ranks)
    process.wait_for(gate.reached, "the held-out documents")
    filler = fill(disk_of_24_mb, 0)
    gate.open()
    codes = process.codes()
    assert codes[0] == 2, process.text()
    the_error(process.text())
    assert not (run / "summary.json").exists()
    filler.unlink()
    finish(corpus, run, *WORDS, ranks=ranks)
    assert (run / "summary.json").exists()


def test_sweep_on_full_disk_leaves_no_file(disk_of_24_mb, environment, tiny):
    filler = fill(disk_of_24_mb, 0)
    words = ["-m", *tiny, "seed=0,1", "run.sweep=full"]
    ended = train(words, disk_of_24_mb, environment)
    assert ended.code == 2, ended
    the_error(ended.err)
    filler.unlink()
    assert list(disk_of_24_mb.iterdir()) == []


@pytest.mark.parametrize("ranks", slow_but([1], [1, 2]))
@pytest.mark.parametrize("instead", slow_but(["nothing"], ["nothing", "another directory"]))
def test_training_stops_if_run_directory_is_removed(corpus, tmp_path, ranks, instead):
    run = tmp_path / "run"
    gate = Gate(run, 5)
    process = start(corpus, run, *WORDS, ranks=ranks)
    process.wait_for(gate.reached, "step 5")
    process.wait_for(lambda: len(list_checkpoints(run / "checkpoints")) == 2, "checkpoint")
    run.rename(tmp_path / "away")  # an atomic step, because the run still writes files
    shutil.rmtree(tmp_path / "away", ignore_errors=True)
    if instead != "nothing":
        run.mkdir()
    codes = process.codes()
    assert set(codes) == {2}, process.text()
    assert "the run directory was removed" in the_error(process.text())
    assert not list(tmp_path.rglob("summary.json"))
