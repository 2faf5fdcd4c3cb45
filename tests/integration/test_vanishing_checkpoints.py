"""If a run deletes a checkpoint while a command reads it, the command reads the next one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs.written import edit_text

from diffllm.checkpoint import manifest, reader
from diffllm.cli import checkpoints, main
from diffllm.core.errors import CheckpointError
from diffllm.evaluation.load import load_model


@pytest.fixture
def run_with_step_4(finished_run: Path, tmp_path: Path) -> Path:
    """Return a run with one checkpoint of step 4, for `save_next_checkpoint`."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    return run


def save_next_checkpoint(run: Path) -> None:
    """Replace the checkpoint of step 4 by a checkpoint of step 8, as if saved meanwhile."""
    from runs.one_rank import sign

    old, new = (run / "checkpoints" / f"step-{step:08d}" for step in (4, 8))
    if old.is_dir():
        old.rename(new)
        edit_text(new / "state.json", '"step": 4', '"step": 8')
        sign(new)


def vanishing(monkeypatch: pytest.MonkeyPatch, run: Path, module: object, name: str) -> list[str]:
    """Make the run replace its checkpoint just before the function `name` reads it."""
    real: Callable[..., object] = getattr(module, name)
    called: list[str] = []

    def late(path: Path, *args: object, **more: object) -> object:
        called.append(name)
        save_next_checkpoint(run)
        return real(path, *args, **more)

    monkeypatch.setattr(module, name, late)
    return called


@pytest.mark.parametrize(
    ("command", "module", "name"),
    [
        ("generate", manifest, "verify"),
        ("generate", manifest, "read_state"),
        ("generate", reader, "read_index"),
        ("consolidate", reader, "read_index"),
        ("checkpoints", manifest, "verify"),
        ("checkpoints", manifest, "read_state"),
        ("checkpoints", checkpoints, "read_state"),
    ],
)
def test_commands_skip_checkpoint_that_another_process_deletes(
    run_with_step_4, tmp_path, monkeypatch, capfd, command, module, name
):
    words = {
        "generate": [f"run={run_with_step_4}", "prompt=a", "max_new_tokens=1"],
        "consolidate": [f"run={run_with_step_4}"],
        "checkpoints": [f"run={run_with_step_4}"],
    }
    called = vanishing(monkeypatch, run_with_step_4, module, name)
    assert main([command, *words[command]]) == 0
    said = capfd.readouterr()
    assert said.err == ""
    assert called
    if command == "consolidate":
        assert "step 8: " in said.out
        consolidated = run_with_step_4 / "consolidated"
        assert [path.name for path in consolidated.iterdir()] == ["step-00000008"]


def test_load_model_raises_error_if_checkpoint_is_deleted_during_load(run_with_step_4, monkeypatch):
    vanishing(monkeypatch, run_with_step_4, reader, "read_index")
    with pytest.raises(CheckpointError, match="has no checkpoint of step 4; available steps:"):
        load_model(run_with_step_4, 4)
