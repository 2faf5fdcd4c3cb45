"""A run with lost checkpoints never restarts silently; a run that never saved restarts."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs.command import ForkedRun, metrics, reached, refusal_of, success_of, train


def unmounted(checkpoints: Path) -> None:
    """Replace the checkpoints by a link to a missing disk."""
    disk = checkpoints.parent / "disk"
    shutil.move(checkpoints, disk)
    checkpoints.symlink_to(disk)
    shutil.move(disk, checkpoints.parent / "unplugged")


def empty(checkpoints: Path) -> None:
    """Replace the checkpoints by an empty directory, as for a disk that is not mounted."""
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()


def replaced_by_file(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.write_text("a file", encoding="utf-8")


LOSSES: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "empty": empty,
    "not mounted": unmounted,
    "a file": replaced_by_file,
}


@pytest.mark.parametrize("name", LOSSES)
def test_train_refuses_run_that_lost_its_checkpoints(killed_run, tiny, tmp_path, environment, name):
    run = killed_run
    before = (run / "metrics.jsonl").read_bytes()
    words = [*tiny, "attention=standard", f"run.dir={run}"]
    LOSSES[name](run / "checkpoints")
    result = train(words, tmp_path, environment)
    line = refusal_of(result)
    assert str(run / "checkpoints") in line
    assert (run / "metrics.jsonl").read_bytes() == before
    if name in ("removed", "empty"):
        assert f"{run} saved a checkpoint at step 4" in line
        assert all(way in line for way in ("run.name", "resume=", f"delete {run}"))


@pytest.mark.parametrize("linked", [False, True])
def test_resume_uses_checkpoints_on_another_disk(killed_run, tiny, tmp_path, environment, linked):
    """The second disk is the target of a link, or the value of resume=."""
    words, disk = [*tiny, "attention=standard", f"run.dir={killed_run}"], tmp_path / "disk"
    shutil.move(killed_run / "checkpoints", disk)
    if linked:
        (killed_run / "checkpoints").symlink_to(disk)
    else:
        words.append(f"resume={disk}")
    success_of(train(words, tmp_path, environment))
    assert [line["step"] for line in metrics(killed_run)] == [1, 2, 4]
    assert (disk / "step-00000004").is_dir() == linked


def test_run_killed_before_first_checkpoint_starts_again(tiny, tmp_path, environment, monkeypatch):
    monkeypatch.setenv("DIFFLLM_CACHE", environment["DIFFLLM_CACHE"])
    run = tmp_path / "run"
    words = [*tiny, "attention=standard", f"run.dir={run}", "log_interval=1"]
    begun = ForkedRun([*words, "steps=4000", "checkpoint.interval=4000"])
    begun.wait_for(lambda: reached(run, 3), "step 3")
    begun.kill()
    assert not list((run / "checkpoints").glob("step-*"))
    ForkedRun([*words, "steps=4", "run.allow_changes=[steps,optim]"]).finish()
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
