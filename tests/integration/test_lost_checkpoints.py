"""A run whose checkpoints are gone is not begun anew in silence; one that never had any is."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs.command import ForkedRun, metrics, reached, train


def unmounted(checkpoints: Path) -> None:
    """The disk behind a link is not there."""
    disk = checkpoints.parent / "disk"
    shutil.move(checkpoints, disk)
    checkpoints.symlink_to(disk)
    shutil.move(disk, checkpoints.parent / "unplugged")


def empty(checkpoints: Path) -> None:
    """The disk is not mounted, and its directory is there."""
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()


def in_the_way(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.write_text("a file")


LOSSES: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "empty": empty,
    "not mounted": unmounted,
    "a file": in_the_way,
}


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A run that has saved step 2 of 4, and was killed."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    (run / "summary.json").unlink()
    return run


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_that_had_saved_is_not_begun_anew(run, tiny, tmp_path, environment, name):
    before = (run / "metrics.jsonl").read_bytes()
    words = [*tiny, "attention=standard", f"run.dir={run}"]
    LOSSES[name](run / "checkpoints")
    result = train(words, tmp_path, environment)
    assert result.code == 2, result.out
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    assert str(run / "checkpoints") in line
    assert (run / "metrics.jsonl").read_bytes() == before
    if name in ("removed", "empty"):
        assert f"{run} has saved step 4" in line
        assert all(way in line for way in ("run.name", "resume=", f"delete {run}"))


def test_a_finished_run_that_is_to_go_on_needs_them_too(finished_run, tiny, tmp_path, environment):
    run = shutil.copytree(finished_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    (run / "saved.json").unlink()  # as in a run of an earlier version
    more = ["steps=6", "run.allow_changes=[steps,optim]", f"run.dir={run}", "attention=standard"]
    result = train([*tiny, *more], tmp_path, environment)
    assert result.code == 2
    assert f"error: {run} has saved step 4, but {run / 'checkpoints'} has no" in result.err
    assert (run / "metrics.jsonl").read_bytes() == (finished_run / "metrics.jsonl").read_bytes()


def test_it_goes_on_from_checkpoints_elsewhere(run, tiny, tmp_path, environment):
    shutil.move(run / "checkpoints", tmp_path / "elsewhere")
    more = ["attention=standard", f"run.dir={run}", f"resume={tmp_path / 'elsewhere'}"]
    result = train([*tiny, *more], tmp_path, environment)
    assert result.code == 0, result.err
    assert [line["step"] for line in metrics(run)] == [1, 2, 4]


def test_checkpoints_on_a_disk_behind_a_link_are_used(run, tiny, tmp_path, environment):
    shutil.move(run / "checkpoints", tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    result = train([*tiny, "attention=standard", f"run.dir={run}"], tmp_path, environment)
    assert result.code == 0, result.err
    assert "continues after step 2" in result.out
    assert (tmp_path / "disk" / "step-00000004").is_dir()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(
    tiny, tmp_path, environment, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    words = [*tiny, "attention=standard", f"run.dir={run}", "log_interval=1"]
    begun = ForkedRun([*words, "steps=4000", "checkpoint.interval=4000"])
    begun.wait_for(lambda: reached(run, 3), "step 3")
    begun.kill()
    assert not list((run / "checkpoints").glob("step-*"))
    ForkedRun([*words, "steps=4", "run.allow_changes=[steps,optim]"]).finish()
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
