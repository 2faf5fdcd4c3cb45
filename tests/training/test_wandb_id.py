"""The wandb id of a restarted run, which is new if the run logs other values of logged steps."""

import json
from pathlib import Path

import pytest
from runs.one_rank import write_checkpoint

from diffllm import load_config
from diffllm.training.directory import RunDirectory
from diffllm.training.wandb_id import choose_wandb_id

OTHER_SEED = ("seed=1", "run.allow_changes=[seed]")
ONLINE, OFFLINE = ("wandb.mode=online",), ("wandb.mode=offline",)


def directory_of(path: Path, *overrides: str) -> RunDirectory:
    cfg = load_config(["model=tiny", f"run.dir={path}", *overrides])
    directory = RunDirectory(path, cfg)
    directory.check()
    return directory


def begun(path: Path, tmp_path: Path, mode: tuple[str, ...], logged: int, saved: int) -> None:
    """Write the files of a run: `logged` lines of metrics, and a checkpoint unless `saved` is 0."""
    tokenizer = tmp_path / "source.model"
    tokenizer.write_bytes(b"pieces")
    directory = directory_of(path, *mode)
    directory.begin(tokenizer)
    directory.describe({"wandb_id": "former"})
    lines = [json.dumps({"step": step, "tokens": step}) for step in range(1, logged + 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    if saved:
        write_checkpoint(path / "checkpoints", saved)
    if mode == ONLINE:
        (path / "wandb" / "run-1-former").mkdir(parents=True)
    directory.lock.release()


@pytest.mark.parametrize(
    ("overrides", "logged", "saved", "reason"),
    [
        (ONLINE, 3, 0, None),
        (ONLINE, 3, 2, None),
        ((*ONLINE, *OTHER_SEED), 3, 0, "cannot replace the steps after 0 of run former"),
        ((*ONLINE, *OTHER_SEED), 3, 2, "cannot replace the steps after 2 of run former"),
        ((*ONLINE, *OTHER_SEED), 2, 2, None),
        ((*ONLINE, "log_interval=7"), 3, 2, "cannot replace the steps after 2 of run former"),
        ((*ONLINE, "eval.sequences=7"), 3, 2, "cannot replace the steps after 2 of run former"),
        ((*ONLINE, "diagnostics.interval=7"), 3, 2, "cannot replace the steps after 2"),
        ((*ONLINE, "eval.sequences=7"), 2, 2, None),
        ((*ONLINE, "checkpoint.interval=7"), 3, 2, None),
        ((*ONLINE, "resume=elsewhere"), 3, 0, "cannot replace the steps after 0 of run former"),
        ((*ONLINE, "resume=elsewhere"), 3, 2, None),
        (OFFLINE, 3, 2, "an offline start does not know the last step of run former"),
    ],
)
def test_restart_changes_wandb_id_only_if_steps_differ_or_last_step_is_unknown(
    tmp_path: Path, overrides: tuple[str, ...], logged: int, saved: int, reason: str | None
) -> None:
    run = tmp_path / "run"
    begun(run, tmp_path, ONLINE, logged, saved)
    directory = directory_of(run, *overrides)
    wandb_id, stated = choose_wandb_id(directory, "of-checkpoint", saved, {})
    assert (wandb_id == "former") == (reason is None)
    assert stated is None if reason is None else reason in stated
    recorded = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert recorded["wandb_id"] == wandb_id
    directory.lock.release()


@pytest.mark.parametrize(
    ("recorded", "saved_id", "expected"),
    [
        (None, "of-checkpoint", "of-checkpoint"),
        ("a/b*", "of-checkpoint", "of-checkpoint"),
        (None, None, "of-variable"),
        ("recorded", None, "recorded"),
    ],
)
def test_wandb_id_is_that_of_run_json_then_checkpoint_then_variable(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: str | None,
    saved_id: str | None,
    expected: str,
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "of-variable")
    directory = directory_of(tmp_path / "run", *OFFLINE)
    directory.describe({"wandb_id": recorded})
    assert choose_wandb_id(directory, saved_id, 0, {}) == (expected, None)
    directory.lock.release()
