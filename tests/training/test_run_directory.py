"""Run directories: names, comparison with the existing run, and protection of foreign files."""

import re
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from processes import PATIENCE_S, call_together, wait_until
from runs.command import snapshot
from runs.json_files import write_json
from runs.one_rank import write_checkpoint
from tiers import families, slow_but

from diffllm import build_model, load_config
from diffllm.config import TrainConfig, loading
from diffllm.config.compose import variants
from diffllm.config.saved import load_run_config
from diffllm.core.errors import CheckpointError, ConfigError, InUseError
from diffllm.core.run_files import read_summary
from diffllm.training.run_directory import (
    RunDirectory,
    choose_path,
    claim_directory,
    ending,
    shared_lock,
)
from diffllm.training.state import continuation, resume_checkpoint

VARIANTS = variants()


@cache
def cached_named_config(overrides: tuple[str, ...]) -> TrainConfig:
    return load_config(["model=tiny", "run.name=a-run", *overrides])


def named_config(*overrides: str) -> TrainConfig:
    return deepcopy(cached_named_config(overrides))


@pytest.fixture
def started_run(tmp_path: Path, source_tokenizer: Path) -> Path:
    """Return the directory of a run with one logged step and one checkpoint."""
    directory = RunDirectory(tmp_path / "run", named_config())
    directory.check()
    directory.begin(source_tokenizer)
    (directory.path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    write_checkpoint(directory.path / "checkpoints", 1)
    directory.lock.release()
    return directory.path


# Names


def test_refused_run_directory_contains_no_lock_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("another's", encoding="utf-8")
    directory = RunDirectory(tmp_path, named_config())
    with pytest.raises(ConfigError, match=r"but no config\.yaml"):
        directory.check()
    assert directory.has_run
    directory.withdraw()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(ConfigError, match="File name too long"):
        RunDirectory(tmp_path / "outputs" / ("x" * 300), named_config())
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_unnamed_runs_started_in_same_second_use_different_directories(workplace, monkeypatch):
    """A third run does not resume the first run, whose lock is free."""
    monkeypatch.setattr("time.strftime", lambda _: "now")
    cfg = load_config(["model=tiny", "attention=gated"])
    held = [claim_directory(cfg), claim_directory(cfg)]
    held[0].lock.release()
    held.append(claim_directory(cfg))
    names = [directory.path.name for directory in held]
    assert names == ["tiny-gated-now", "tiny-gated-now-2", "tiny-gated-now-3"]


def claimed_name(cfg: TrainConfig) -> str:
    directory = claim_directory(cfg)
    directory.check()
    return directory.path.name


def test_concurrent_processes_claim_different_directories_for_unnamed_runs(workplace, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _: "now")
    claimed = call_together(claimed_name, 8, load_config(["model=tiny", "attention=gated"]))
    expected = ["tiny-gated-now", *(f"tiny-gated-now-{number}" for number in range(2, 9))]
    assert sorted(claimed) == expected
    assert sorted(path.name for path in (workplace / "outputs").iterdir()) == expected


def test_refused_unnamed_run_leaves_no_directory(workplace):
    claim_directory(load_config(["model=tiny"])).withdraw()
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize("name", ["a/b", "..", "a b", "a\n", "", "x" * 231])
def test_invalid_run_name_is_refused(name):
    """Names have at most 230 bytes, because log files append suffixes."""
    cfg = named_config()
    cfg.run.name = name
    with pytest.raises(ConfigError, match=r"run\.name="):
        choose_path(cfg)
    assert choose_path(named_config(f"run.name={'x' * 230}")).name == "x" * 230


# Identity


def test_resume_with_same_config_is_allowed(started_run):
    before = snapshot(started_run)
    RunDirectory(started_run, named_config()).check()
    assert snapshot(started_run) == before


OTHERS = [
    ("seed=7", "seed: 0 in the run, 7 in this command"),
    ("optim.weight_decay=0.5", "optim.weight_decay: 0.1 in the run, 0.5 in this command"),
    ("attention=standard", "model.attention.head_norm"),
    ("steps=301", "steps"),
    ("max_tokens=1e7", "max_tokens: None in the run, 10000000.0 in this command"),
    ("precision=fp32", "precision: auto in the run, fp32 in this command"),
    ("data.mask_documents=true", "data.mask_documents: False in the run, True in this command"),
]


@pytest.mark.parametrize(("override", "key"), slow_but(OTHERS[:2], OTHERS))
def test_resume_error_for_changed_config_mentions_changed_key(started_run, override, key):
    before = snapshot(started_run)
    with pytest.raises(ConfigError, match="was made with another config") as caught:
        RunDirectory(started_run, named_config(override)).check()
    named = [part.strip() for part in re.split(r"[(;)]", str(caught.value))]
    assert any(part.startswith(key) for part in named)
    assert "\n" not in str(caught.value)
    assert snapshot(started_run) == before


def test_resume_error_names_experiment_of_the_run(started_run):
    """An older version chose other defaults for the same command."""
    cfg = named_config("seed=7")
    cfg.resolved.choices["experiment"] = "quickstart"
    with pytest.raises(ConfigError, match=r"choose another run.name, add experiment=none, or"):
        RunDirectory(started_run, cfg).check()


FREE = [
    "log_interval=3",
    "parallel=hsdp",
    "micro_batch_size=2",
    "checkpoint.interval=7",
    "eval.interval=7",
    "compile=false",
    "data.cache_dir=/elsewhere",
    "data.num_workers=0",
    "run.name=another-name",
]


@pytest.mark.parametrize("override", slow_but(FREE[:3], FREE))
def test_resume_allows_changes_of_settings_that_do_not_affect_results(started_run, override):
    RunDirectory(started_run, named_config(override)).check()


def test_resume_of_older_diff_v1_run_accepts_explicit_value_layout(tmp_path, source_tokenizer):
    """Configs of older versions contain `wide`; now the device decides."""
    first = RunDirectory(
        tmp_path / "run", named_config("attention=diff_v1", "model.attention.values=wide")
    )
    first.begin(source_tokenizer)
    first.lock.release()
    (first.path / "metrics.jsonl").touch()
    again = named_config("attention=diff_v1")
    assert again.model.attention != first.cfg.model.attention
    RunDirectory(first.path, again).check()


MATCHED = ("attention=standard", "model.match_params_to=diff_v2")


@pytest.fixture
def matched_run(tmp_path: Path, source_tokenizer: Path) -> Path:
    directory = RunDirectory(tmp_path / "matched", named_config(*MATCHED))
    directory.begin(source_tokenizer)
    (directory.path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    directory.lock.release()
    return directory.path


def test_resume_of_parameter_matched_run_keeps_ffn_width(matched_run, monkeypatch):
    again = named_config(*MATCHED)
    RunDirectory(matched_run, again).check()
    monkeypatch.setattr(loading, "match", None)  # Loading must use the saved width.
    saved = load_run_config(matched_run)
    assert saved == again
    assert (saved.resolved.matched.target_ffn_dim, saved.resolved.matched.target) == (
        384,
        "diff_v2",
    )
    params = sum(p.numel() for p in build_model(saved.model).parameters())
    assert params == saved.resolved.matched.params
    assert saved.model.ffn_dim == saved.resolved.matched.ffn_dim > 384


def test_resume_keeps_tokenizer_and_removes_incomplete_checkpoints(started_run, tmp_path):
    cut_short = started_run / "checkpoints" / ".step-00000002.incomplete"
    cut_short.mkdir(parents=True)
    (cut_short / "part").touch()
    other = tmp_path / "other.model"
    other.write_bytes(b"other pieces")
    directory = RunDirectory(started_run, named_config())
    directory.begin(other, step=1)
    assert (started_run / "tokenizer.model").read_bytes() == b"pieces"
    assert not cut_short.exists()
    assert [path.name for path in directory.checkpoints] == ["step-00000001"]
    directory.begin(other)  # without a usable checkpoint, the run begins again
    assert (started_run / "tokenizer.model").read_bytes() == b"other pieces"


def test_run_with_fewer_steps_than_configured_is_not_finished(started_run):
    directory = RunDirectory(started_run, named_config())
    assert ending(directory.path, directory.cfg) is None
    directory.finish({"steps": named_config().steps})
    assert ending(directory.path, directory.cfg) == {"steps": named_config().steps}
    directory.finish({"steps": named_config().steps - 1})
    assert ending(directory.path, directory.cfg) is None, "the finished run had fewer steps"


def test_diverged_run_resumes_only_after_change_of_training_settings(started_run):
    directory = RunDirectory(started_run, named_config())
    directory.finish({"steps": 3, "stopped": "skipped"})
    assert ending(directory.path, directory.cfg)["steps"] == 3
    assert read_summary(started_run) is None
    directory.cfg = named_config("log_interval=1", "checkpoint.interval=2")
    assert ending(directory.path, directory.cfg), "logging and saving cannot prevent divergence"
    others = (
        "train.max_consecutive_skips=21",
        "optim.lr=1",
        "data.paths=[a]",
        "run.allow_changes=[corpus]",
    )
    for other in others:
        directory.cfg = named_config(other)
        assert ending(directory.path, directory.cfg) is None, other


@pytest.mark.parametrize("change", ["steps=30", "seed=1"])
def test_resume_of_finished_run_refuses_changed_settings(started_run, change):
    directory = RunDirectory(
        started_run, named_config("run.allow_changes=[steps,optim,eval,seed]", change)
    )
    directory.finish({"steps": directory.cfg.steps if change == "seed=1" else 70})
    before = snapshot(started_run)
    with pytest.raises(ConfigError, match=r"is already at step \d+; these settings"):
        directory.check()
    assert snapshot(started_run) == before


def test_new_unnamed_run_in_existing_sweep_raises_config_error(workplace):
    cfg = named_config("run.name=null", "run.sweep=first")
    assert choose_path(cfg).parent == Path("outputs/first")
    Path("outputs/first").mkdir(parents=True)
    Path("outputs/first/sweep.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.sweep=first already exists; to resume .* add -m"):
        choose_path(cfg)
    assert choose_path(named_config("run.sweep=first")) == Path("outputs/first/a-run")


@pytest.mark.parametrize(
    ("word", "former", "corrected"),
    [
        ("run.name=1.10", "outputs/1.1", "run.name=1.1"),
        ("run.dir=2024_10", "202410", "run.dir=202410"),
        ("run.sweep=1e5", "outputs/100000.0/seed0", "run.sweep=100000.0"),
    ],
)
def test_new_run_refuses_name_that_older_version_read_as_number(workplace, word, former, corrected):
    assert choose_path(named_config(word))
    Path(former).mkdir(parents=True)
    write_json(Path(former) / "run.json", {"command": f"train.py {word} seed=0"})
    with pytest.raises(ConfigError, match=f"to resume, set {re.escape(corrected)};"):
        choose_path(named_config(word))
    assert choose_path(named_config(corrected))
    write_json(Path(former) / "run.json", {"command": f"train.py {corrected}"})
    assert choose_path(named_config(word))


def test_run_directory_without_write_access_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a directory", encoding="utf-8")
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    for path in (tmp_path / "file" / "run", tmp_path / "run", Path("/proc/sys/run")):
        with pytest.raises(ConfigError, match="cannot be written"):
            RunDirectory(path, named_config())


# config.yaml


@pytest.mark.parametrize("variant", slow_but(families(VARIANTS), VARIANTS))
def test_config_loaded_from_run_directory_equals_original(tmp_path, source_tokenizer, variant):
    cfg = named_config(
        f"attention={variant}",
        "seed=3",
        "seq_len=64",
        "model.dim=64",
        "model.rope.theta=5000",
        "model.qk_norm=true",
        "model.tie_embeddings=true",
        "precision=fp32",
        "data.sample_prompt='a: b # c'",
        "run.swept=[seed,optim.lr]",
    )
    RunDirectory(tmp_path / "run", cfg).begin(source_tokenizer)
    again = load_run_config(tmp_path / "run")
    assert again == cfg
    assert type(again.model.attention) is type(cfg.model.attention)
    first, second = build_model(cfg.model).state_dict(), build_model(again.model).state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# Resume


def test_resume_setting_determines_starting_checkpoint(tmp_path):
    own = [write_checkpoint(tmp_path / "own" / "checkpoints", step) for step in (100, 20)][::-1]
    other = [write_checkpoint(tmp_path / "other" / "checkpoints", step) for step in (5, 9)]
    assert resume_checkpoint(named_config("resume=auto"), []) is None
    assert resume_checkpoint(named_config("resume=auto"), own) == own[-1]
    assert resume_checkpoint(named_config("resume=never"), []) is None
    for path in (tmp_path / "other", tmp_path / "other" / "checkpoints", other[-1]):
        assert resume_checkpoint(named_config(f"resume={path}"), []) == other[-1]
    assert resume_checkpoint(named_config(f"resume={other[0]}"), []) == other[0]
    # A requeued job with `resume=PATH` must resume from its latest checkpoint, not from PATH again.
    assert resume_checkpoint(named_config(f"resume={other[0]}"), own) == own[-1]
    assert resume_checkpoint(named_config(f"resume={tmp_path / 'other'}@5"), own) == own[-1]
    run = tmp_path / "own"
    inside = run / "checkpoints"
    (inside / "step-00000010.bak").mkdir()
    (tmp_path / "disk").symlink_to(inside)
    for path in (run, f"{run}@100", own[-1], inside, f"{inside}@100", tmp_path / "disk"):
        assert resume_checkpoint(named_config(f"resume={path}"), own) == own[-1]
    for path in (f"{run}@20", f"{run}@30", own[0], f"{inside}@20", tmp_path / "disk" / own[0].name):
        with pytest.raises(
            ConfigError, match=r"is not the newest checkpoint .*\(step 100\); delete"
        ):
            resume_checkpoint(named_config(f"resume={path}"), own)
        # A requeued job repeats a command that was valid at its first start.
        assert resume_checkpoint(named_config(f"resume={path}"), own, str(path)) == own[-1]
    for path in (inside / "best", inside / "step-00000010.bak", f"{own[-1]}@20", own[0] / "x"):
        with pytest.raises(ConfigError, match=r"is not a checkpoint of this run; resume=auto"):
            resume_checkpoint(named_config(f"resume={path}"), own, "auto")
    checkpoint = resume_checkpoint(
        named_config(f"resume={tmp_path / 'other' / 'checkpoints'}@5"), []
    )
    assert checkpoint == other[0]
    for path, why in ((tmp_path, "is not a checkpoint"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises(CheckpointError, match=why):
            resume_checkpoint(named_config(f"resume={path}"), [])


def test_requeued_command_with_own_checkpoint_resumes_from_newest(tmp_path, source_tokenizer):
    run = tmp_path / "run"
    first = write_checkpoint(run / "checkpoints", 20)
    cfg = named_config(f"resume={run}@20")
    directory = RunDirectory(run, cfg)
    assert continuation(cfg, directory)[0] == first
    directory.begin(source_tokenizer, 20)
    newest = write_checkpoint(run / "checkpoints", 30)
    assert continuation(cfg, directory)[0] == newest
    with pytest.raises(ConfigError, match="is not the newest checkpoint"):
        continuation(named_config(f"resume={first}"), directory)


# Locks


def test_start_waits_for_readers_but_not_for_another_run(started_run, capsys):
    output = []
    with ThreadPoolExecutor(1) as pool:
        with shared_lock(started_run) as ended:
            assert ended
            start = pool.submit(RunDirectory, started_run, named_config())
            wait_until(lambda: output.append(capsys.readouterr().err) or any(output), "message")
            assert not start.done()
        directory = start.result(PATIENCE_S)
    assert "".join(output) == f"waiting until diffllm wandb has written {started_run} to wandb\n"
    with shared_lock(started_run) as ended:
        assert not ended
    with pytest.raises(InUseError, match="is in use by process"):
        RunDirectory(started_run, named_config())
    directory.lock.release()
