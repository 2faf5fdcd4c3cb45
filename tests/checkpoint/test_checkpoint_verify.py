"""Verification, selection and deletion of checkpoints."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from runs.json_files import read_json, write_json
from runs.one_rank import flip_bit, loop_of, sign, write_checkpoint

from diffllm import load_config
from diffllm.checkpoint.manifest import MANIFEST, faults, verify
from diffllm.checkpoint.run_checkpoints import CheckpointConfig, find_checkpoint, newest_good
from diffllm.checkpoint.writer import Checkpointer
from diffllm.cli import main
from diffllm.core.errors import CheckpointError
from diffllm.core.run_files import list_checkpoints, step_of
from diffllm.training.state import resume_checkpoint

pytestmark = pytest.mark.usefixtures("gloo")

STATE = {"parameters": {"w": [2, 3]}, "ranks": 1, "loop": {"step": 1}}


def saved_tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((40, 50), value)}


def save_steps(directory: Path, *steps: int, start: int = 0, **cfg: object) -> None:
    """Save at `steps`, like a run that starts after step `start`."""
    checkpointer = Checkpointer(directory, CheckpointConfig(**cfg), start)  # type: ignore[arg-type]
    for step in steps:
        checkpointer.save(step, saved_tensors(float(step)), {**STATE, "loop": loop_of(step)})
    checkpointer.close()


@pytest.fixture
def intact_checkpoint(tmp_path):
    save_steps(tmp_path, 7)
    return tmp_path / "step-00000007"


DAMAGES = {
    "missing": (lambda file: file.unlink(), "is missing"),
    "short": (lambda file: os.truncate(file, 10), "has 10 bytes, not"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"\0"), "bytes, not"),
    "a bit": (flip_bit, "has a wrong checksum"),
    "a directory": (lambda file: (file.unlink(), file.mkdir()), "is not a regular file"),
}


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
@pytest.mark.parametrize("how", DAMAGES)
def test_verify_reports_damaged_checkpoint_file(intact_checkpoint, name, how):
    damage, said = DAMAGES[how]
    damage(intact_checkpoint / name)
    (problem,) = verify(intact_checkpoint)
    assert problem.startswith(f"{name} ")
    assert said in problem
    assert (verify(intact_checkpoint, checksums=False) == []) == (how == "a bit")


def test_verify_reports_checkpoint_without_manifest(intact_checkpoint):
    (intact_checkpoint / MANIFEST).unlink()
    assert verify(intact_checkpoint) == [f"{MANIFEST} is missing"]


@pytest.fixture
def three(tmp_path):
    """Return the three checkpoints of a run, oldest first."""
    return [write_checkpoint(tmp_path / "checkpoints", step) for step in (10, 20, 30)]


def auto(own: list[Path]) -> Path | None:
    return resume_checkpoint(load_config(["model=tiny"]), own)


def content(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_resume_prints_warning_for_each_damaged_checkpoint(three, capfd):
    flip_bit(three[2] / ".metadata")
    (three[1] / "state.json").unlink()
    before = content(three[2]), content(three[1])
    assert auto(three) == three[0]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("warning: damaged checkpoint ") for line in lines)
    assert "step-00000030 (.metadata has a wrong checksum)" in lines[0]
    assert "step-00000020 (state.json is missing)" in lines[1]
    assert all("using step-00000010" in line for line in lines)
    assert (content(three[2]), content(three[1])) == before


def test_resume_fails_if_all_checkpoints_are_damaged(three, capfd):
    for path in three:
        flip_bit(path / "state.json")
    with pytest.raises(CheckpointError) as caught:
        auto(three)
    assert all(path.name in str(caught.value) for path in three)
    assert str(caught.value).count("state.json has a wrong checksum") == 3
    assert capfd.readouterr().err == ""
    assert auto([]) is None


def test_resume_raises_error_if_requested_checkpoint_is_damaged(three):
    flip_bit(three[2] / "state.json")
    with pytest.raises(CheckpointError, match=r"step-00000030 is damaged: state\.json has a wrong"):
        resume_checkpoint(load_config(["model=tiny", f"resume={three[2]}"]), [])
    with pytest.raises(CheckpointError, match=r"step-00000030 is damaged: state\.json has a wrong"):
        find_checkpoint(three[0].parents[1], 30)


def test_resume_from_run_directory_uses_newest_undamaged_checkpoint(three, capfd):
    flip_bit(three[2] / "state.json")
    run = three[0].parents[1]
    for path in (run, run / "checkpoints"):
        assert resume_checkpoint(load_config(["model=tiny", f"resume={path}"]), []) == three[1]
        assert "step-00000030" in capfd.readouterr().err
    assert find_checkpoint(run) == three[1]


def test_renamed_checkpoint_directory_is_rejected(three, capfd):
    """Checksums match, so only the content of the manifest shows the fault."""
    renamed = three[2].rename(three[2].with_name("step-00000070"))
    (fault,) = faults(renamed)
    assert fault == "manifest.json has step 30, but the directory name has 70"
    assert main(["checkpoints", f"run={renamed.parents[1]}"]) == 1
    assert "has step 30" in capfd.readouterr().out
    assert newest_good([*three[:2], renamed]) == three[1]


def test_resume_skips_checkpoint_with_invalid_state_and_matching_checksums(three, capfd):
    state = read_json(three[2] / "state.json")
    state["loop"]["tokens"] = -1
    write_json(three[2] / "state.json", state)
    sign(three[2])
    assert verify(three[2]) == []
    assert newest_good(three) == auto(three) == three[1]
    assert "(loop.tokens in state.json is missing or invalid)" in capfd.readouterr().err


def checkpoint_steps(directory: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(directory)]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [(2, 30, [30, 60, 80, 90]), (0, 30, [10, 20, 30, 40, 50, 60, 70, 80, 90])],
)
def test_checkpoint_pruning_obeys_keep_last_and_keep_every(tmp_path, keep_last, keep_every, left):
    save_steps(tmp_path, *range(10, 100, 10), keep_last=keep_last, keep_every=keep_every)
    assert checkpoint_steps(tmp_path) == left


def test_new_save_renames_damaged_checkpoint_of_same_step(tmp_path, capfd):
    save_steps(tmp_path, 10, 20, 30, 40, keep_last=0)
    for step in (30, 40):
        flip_bit(tmp_path / f"step-{step:08d}" / "__0_0.distcp")
    assert newest_good(list_checkpoints(tmp_path)) == tmp_path / "step-00000020"
    capfd.readouterr()
    damaged = content(tmp_path / "step-00000030")
    save_steps(tmp_path, 25, 30, start=20, keep_last=2)
    assert checkpoint_steps(tmp_path) == [25, 30, 40]
    assert verify(tmp_path / "step-00000030") == []
    aside = tmp_path / "damaged-step-00000030"
    assert list(content(aside).values()) == list(damaged.values())
    assert capfd.readouterr().err == (
        f"warning: renamed {tmp_path / 'step-00000030'} to damaged-step-00000030: "
        "a new checkpoint needs the name\n"
    )
    save_steps(tmp_path, 40, start=30, keep_last=2)
    assert checkpoint_steps(tmp_path) == [30, 40]
    assert verify(tmp_path / "step-00000040") == []


def test_checkpoint_save_to_full_disk_prints_warning(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 8_000))
    save_steps(tmp_path, 10)
    said = capfd.readouterr().err
    assert "step 10 could not be saved" in said
    assert "a checkpoint needs 10," in said
    assert "8,000 are free" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "steps", "seconds"),
    [("7", 7, None), ("30min", 0, 1800), ("1.5min", 0, 90), ("2h", 0, 7200), ("90s", 0, 90)],
)
def test_checkpoint_interval_accepts_steps_or_duration(word, steps, seconds):
    cfg = load_config(["model=tiny", f"checkpoint.interval={word}"]).checkpoint
    assert (cfg.steps, cfg.seconds) == (steps, seconds)


def test_checkpointer_due_returns_true_once_per_interval(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("diffllm.checkpoint.writer.monotonic", lambda: now[0])
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(interval="1min"))
    answers = []
    for now[0] in (59, 60, 61, 119, 120):
        answers.append(checkpointer.due())
    assert answers == [False, True, False, False, True]
    now[0] = 170
    checkpointer.save(1, saved_tensors(), STATE)
    now[0] = 229
    assert not checkpointer.due()
    now[0] = 230
    assert checkpointer.due()
    checkpointer.close()
    by_steps = Checkpointer(tmp_path, CheckpointConfig(interval=1))
    assert not by_steps.due()
    by_steps.close()


def listed_checkpoints(
    run: Path, capfd: pytest.CaptureFixture[str], *words: str
) -> tuple[int, list[dict]]:
    code = main(["checkpoints", f"run={run}", "--json", *words])
    return code, json.loads(capfd.readouterr().out)


def test_checkpoints_command_shows_state_of_each_checkpoint(tmp_path, capfd):
    save_steps(tmp_path / "checkpoints", 10, 20, 30, keep_last=0)
    (tmp_path / "checkpoints" / ".step-00000040.incomplete").mkdir()
    code, rows = listed_checkpoints(tmp_path, capfd)
    assert code == 0
    assert [(row["step"], row["state"]) for row in rows] == [
        (10, "good"),
        (20, "good"),
        (30, "good"),
        (40, "incomplete"),
    ]
    first = tmp_path / "checkpoints" / "step-00000010"
    assert rows[0]["ranks"] == 1
    assert rows[0]["bytes"] == sum(file.stat().st_size for file in first.iterdir())

    flip_bit(tmp_path / "checkpoints" / "step-00000020" / "__0_0.distcp")
    code, rows = listed_checkpoints(tmp_path, capfd)
    assert code == 1
    assert [row["state"] for row in rows] == ["good", "damaged", "good", "incomplete"]
    assert rows[1]["problems"] == ["__0_0.distcp has a wrong checksum"]
    code, rows = listed_checkpoints(tmp_path, capfd, "verify=false")
    assert (code, rows[1]["state"], rows[1]["checksums"]) == (0, "good", False)

    assert main(["checkpoints", f"run={tmp_path}"]) == 1
    table = capfd.readouterr().out
    assert "damaged: __0_0.distcp has a wrong checksum" in table
    assert "incomplete" in table
