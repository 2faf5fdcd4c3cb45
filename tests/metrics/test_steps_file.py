"""steps.npy has the rows of every step after kills, resumes and damage."""

from pathlib import Path

import numpy as np
import pytest
from disks import small_disk

from diffllm.core.errors import CheckpointError
from diffllm.metrics.steps import HEADER_SIZE, STEP_DTYPE, StepsFile, read_steps


def step_rows(first: int, last: int) -> np.ndarray:
    found = np.zeros(last - first + 1, STEP_DTYPE)
    found["step"] = np.arange(first, last + 1)
    found["train/loss"] = 1 / found["step"]
    return found


def append_steps(path: Path, first: int, last: int, last_step: int = 0) -> None:
    file = StepsFile(path, last_step)
    file.append(step_rows(first, last))
    file.close()


def test_numpy_reads_steps_file_after_each_append(tmp_path):
    file = StepsFile(tmp_path / "steps.npy")
    for step in range(1, 30, 3):
        file.append(step_rows(step, step + 2))
        assert (np.load(tmp_path / "steps.npy") == step_rows(1, step + 2)).all()
    file.close()
    assert (read_steps(tmp_path / "steps.npy") == step_rows(1, 30)).all()


@pytest.mark.parametrize("last", [1, 5, 9])
def test_resume_removes_rows_of_later_steps(tmp_path, last):
    path = tmp_path / "steps.npy"
    append_steps(path, 1, 6)
    append_steps(path, last + 1, last + 2, last)
    expected = np.concatenate([step_rows(1, min(last, 6)), step_rows(last + 1, last + 2)])
    assert (np.load(path) == expected).all()


@pytest.mark.parametrize("lost", [1, STEP_DTYPE.itemsize, 3 * STEP_DTYPE.itemsize + 7])
def test_rows_lost_in_power_failure_do_not_hinder_resume(tmp_path, lost):
    """The header may count rows that the disk does not have or has only in part."""
    path = tmp_path / "steps.npy"
    append_steps(path, 1, 6)
    content = path.read_bytes()
    path.write_bytes(content[:-lost])
    complete = (len(content) - lost - HEADER_SIZE) // STEP_DTYPE.itemsize
    assert (read_steps(path) == step_rows(1, complete)).all()
    append_steps(path, 7, 8, 6)
    assert (np.load(path)["step"] == [*range(1, complete + 1), 7, 8]).all()


def test_row_that_header_does_not_count_yet_is_omitted(tmp_path):
    path = tmp_path / "steps.npy"
    append_steps(path, 1, 3)
    with open(path, "ab") as stream:
        stream.write(step_rows(4, 4).tobytes())
    assert (read_steps(path) == step_rows(1, 3)).all()


def test_steps_file_writes_missing_rows_after_disk_space_is_freed(tmp_path, capfd):
    with small_disk(tmp_path / "disk", "64k") as disk:
        file = StepsFile(disk / "steps.npy")
        (ballast := disk / "ballast").write_bytes(b"0" * 56 * 1024)
        for step in range(1, 401, 10):
            file.append(step_rows(step, step + 9))
        assert len(np.load(disk / "steps.npy")) < 400, "the disk was not full"
        ballast.unlink()
        file.close()
        assert (np.load(disk / "steps.npy") == step_rows(1, 400)).all()
    said = capfd.readouterr().err
    assert said.count("warning: ") == 1
    assert "steps.npy, rows are kept in memory" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros(3), "has other columns"),
        (np.array([{}], dtype=object), "has other columns"),
        (step_rows(3, 4)[::-1], "its steps do not increase"),
    ],
)
def test_foreign_steps_file_is_refused(tmp_path, content, message):
    np.save(tmp_path / "steps.npy", content)
    with pytest.raises(CheckpointError, match=f"steps.npy is .*{message}"):
        read_steps(tmp_path / "steps.npy")


def test_text_in_place_of_steps_file_is_refused(tmp_path):
    (tmp_path / "steps.npy").write_text("step,loss\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"steps\.npy"):
        read_steps(tmp_path / "steps.npy")
