"""The wandb id of a restarted run, which is new if the run logs other values of logged steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs.json_files import read_json
from runs.one_rank import write_checkpoint

from diffllm import load_config
from diffllm.metrics.wandb_config import WandbConfig
from diffllm.metrics.wandb_uploads import UPLOADS, store_uploaded_id
from diffllm.training.run_directory import RunDirectory
from diffllm.training.wandb_description import record_wandb
from diffllm.training.wandb_id import choose_wandb_id

PROJECT = WandbConfig(project="diffllm")
OTHER_SEED = ("seed=1", "run.allow_changes=[seed]")
ONLINE, OFFLINE = ("wandb.mode=online",), ("wandb.mode=offline",)


def directory_of(path: Path, *overrides: str) -> RunDirectory:
    cfg = load_config(["model=tiny", f"run.dir={path}", *overrides])
    directory = RunDirectory(path, cfg)
    directory.check()
    return directory


def write_begun_run(
    path: Path, tmp_path: Path, mode: tuple[str, ...], logged: int, saved: int
) -> None:
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
        (path / "wandb" / "run-20260101_000000-former").mkdir(parents=True)
    directory.lock.release()


@pytest.mark.fast_cases(5)
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
    tmp_path, overrides, logged, saved, reason
):
    run = tmp_path / "run"
    write_begun_run(run, tmp_path, ONLINE, logged, saved)
    directory = directory_of(run, *overrides)
    wandb_id, stated = choose_wandb_id(directory, "of-checkpoint", saved, {})
    assert (wandb_id == "former") == (reason is None)
    assert stated is None if reason is None else reason in stated
    assert record_of(run)["wandb_id"] == wandb_id
    directory.lock.release()


def record_of(run: Path) -> dict[str, Any]:
    return read_json(run / "run.json")


@pytest.mark.parametrize("evidence", ["directory", "run.json", "upload"])
def test_offline_start_of_online_run_has_new_id_in_any_wandb_dir(tmp_path, monkeypatch, evidence):
    run = tmp_path / "run"
    write_begun_run(run, tmp_path, OFFLINE, 3, 3)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "scratch"))
    directory = directory_of(run, *OFFLINE)
    assert choose_wandb_id(directory, None, 3, {}) == ("former", None)
    if evidence == "directory":
        (tmp_path / "scratch" / "wandb" / "run-20260101_000000-former").mkdir(parents=True)
    elif evidence == "run.json":
        directory.describe({"wandb_id": "former", "wandb_online": True})
    else:
        store_uploaded_id(run, "former", PROJECT, "former")
    offline_id, reason = choose_wandb_id(directory, None, 3, {})
    assert reason == "an offline start does not know the last step of run former on the server"
    assert record_of(run) == {"wandb_id": offline_id}
    assert choose_wandb_id(directory, None, 3, {}) == (offline_id, None)
    directory.lock.release()


def test_resume_continues_newest_upload_to_same_project(tmp_path):
    run = tmp_path / "run"
    write_begun_run(run, tmp_path, ONLINE, 3, 3)
    store_uploaded_id(run, "former", replace(PROJECT, project="moved"), "elsewhere")
    directory = directory_of(run, *ONLINE)
    assert choose_wandb_id(directory, None, 3, {}) == ("former", None)
    for newest in ("first", "second"):
        store_uploaded_id(run, "former", PROJECT, newest)
    assert choose_wandb_id(directory, None, 3, {}) == ("second", None)
    assert record_of(run) == {"wandb_id": "second", "wandb_online": True}
    store_uploaded_id(run, "second", PROJECT, "a/b*")
    assert choose_wandb_id(directory, None, 3, {}) == ("second", None)
    (run / UPLOADS).write_text("{", encoding="utf-8")
    assert choose_wandb_id(directory, None, 3, {}) == ("second", None)
    directory.lock.release()


def test_record_wandb_replaces_id_and_keeps_online_only_for_same_id(tmp_path):
    run = tmp_path / "run"
    directory = directory_of(run, *ONLINE)
    directory.describe({"wandb_id": "first", "weights": "w"})
    (run / "wandb" / "run-20260101_000000-first").mkdir(parents=True)
    record_wandb(directory, "first")
    (run / "wandb" / "run-20260101_000000-first").rmdir()
    record_wandb(directory, "first")
    assert record_of(run) == {"wandb_id": "first", "weights": "w", "wandb_online": True}
    record_wandb(directory, "second")
    assert record_of(run) == {"wandb_id": "second", "weights": "w"}
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
    tmp_path, monkeypatch, recorded, saved_id, expected
):
    monkeypatch.setenv("WANDB_RUN_ID", "of-variable")
    directory = directory_of(tmp_path / "run", *OFFLINE)
    directory.describe({"wandb_id": recorded})
    assert choose_wandb_id(directory, saved_id, 0, {}) == (expected, None)
    directory.lock.release()
