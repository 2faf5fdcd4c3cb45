"""A run's directory: its name, its identity, and that nothing foreign is believed or harmed."""

import os
import re
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from runs.one_rank import write_checkpoint
from tiers import families, slow_but

from diffllm import build_model, load_config
from diffllm.config import TrainConfig, loading
from diffllm.config.compose import variants
from diffllm.config.saved import load_run_config
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.metrics.records import read_summary
from diffllm.training.directory import RunDirectory, choose_path, claim_directory, ending
from diffllm.training.state import resume_checkpoint

VARIANTS = variants()


@cache
def loaded(overrides: tuple[str, ...]) -> TrainConfig:
    return load_config(["model=tiny", "run.name=a-run", *overrides])


def tiny(*overrides: str) -> TrainConfig:
    return deepcopy(loaded(overrides))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "source.model"
    path.write_bytes(b"pieces")
    return path


@pytest.fixture
def begun(tmp_path: Path, tokenizer: Path) -> Path:
    """The directory of a run that has begun, logged a step and saved a checkpoint."""
    directory = RunDirectory(tmp_path / "run", tiny())
    directory.check()
    directory.begin(tokenizer)
    (directory.path / "metrics.jsonl").write_text('{"step": 1}\n')
    write_checkpoint(directory.path / "checkpoints", 1)
    directory.lock.release()
    return directory.path


def snapshot(path: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


# Names


def test_a_run_goes_below_outputs_under_its_name():
    assert choose_path(tiny()) == Path("outputs/a-run")
    assert choose_path(tiny("run.sweep=lrs")) == Path("outputs/lrs/a-run")
    assert choose_path(tiny("run.dir=/somewhere/else")) == Path("/somewhere/else")
    assert choose_path(tiny("run.dir=/somewhere/else", "run.sweep=lrs")) == Path("/somewhere/else")


def test_a_home_directory_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert choose_path(tiny("run.dir='~/runs/x'")) == Path("/home/someone/runs/x")


def test_a_run_without_a_name_gets_one_that_says_what_it_is():
    path = choose_path(load_config(["model=tiny", "attention=gated"]))
    assert path.parent == Path("outputs")
    assert path.name.startswith("tiny-gated-2")


def test_a_directory_that_is_refused_keeps_no_lock(tmp_path):
    """Nor parents that were made for it."""
    (tmp_path / "metrics.jsonl").write_text("another's")
    directory = RunDirectory(tmp_path, tiny())
    with pytest.raises(ConfigError, match="not a run of ours"):
        directory.check()
    assert directory.has_run
    directory.withdraw()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(ConfigError, match="File name too long"):
        RunDirectory(tmp_path / "outputs" / ("x" * 300), tiny())
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_name_leaves_room_for_the_names_of_logs():
    with pytest.raises(ConfigError, match=r"run\.name='x+' must be .* at most 230 bytes"):
        choose_path(tiny(f"run.name={'x' * 231}"))
    assert choose_path(tiny(f"run.name={'x' * 230}")).name == "x" * 230


def test_runs_without_a_name_that_start_in_one_second_are_apart(tmp_path, monkeypatch):
    """Also where the first has ended: it is not continued."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "now")
    cfg = load_config(["model=tiny", "attention=gated"])
    held = [claim_directory(cfg), claim_directory(cfg)]
    held[0].lock.release()
    held.append(claim_directory(cfg))
    names = [directory.path.name for directory in held]
    assert names == ["tiny-gated-now", "tiny-gated-now-2", "tiny-gated-now-3"]


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "..", "a b", "/abs", "a\n", ""])
def test_a_name_that_is_not_one_path_component_is_refused(name):
    cfg = tiny()
    cfg.run.name = name
    with pytest.raises(ConfigError, match=r"run\.name="):
        choose_path(cfg)


# Identity


def test_the_same_config_may_go_on(begun):
    before = snapshot(begun)
    RunDirectory(begun, tiny()).check()
    assert snapshot(begun) == before


OTHERS = [
    ("seed=7", "seed: 0 there, 7 here"),
    ("optim.weight_decay=0.5", "optim.weight_decay: 0.1 there, 0.5 here"),
    ("steps=301", "steps"),
    ("global_batch_size=32", "global_batch_size"),
    ("model.n_layers=3", "model.n_layers: 2 there, 3 here"),
    ("precision=fp32", "precision: auto there, fp32 here"),
    ("data.heldout_fraction=0.1", "data.heldout_fraction"),
    ("data.mask_documents=true", "data.mask_documents: False there, True here"),
]


@pytest.mark.parametrize(("override", "key"), slow_but(OTHERS[:2], OTHERS))
def test_another_config_is_refused_by_key_and_nothing_is_touched(begun, override, key):
    before = snapshot(begun)
    with pytest.raises(ConfigError, match="is a run with another config") as caught:
        RunDirectory(begun, tiny(override)).check()
    named = [part.strip() for part in re.split(r"[(;)]", str(caught.value))]
    assert any(part.startswith(key) for part in named)
    assert "\n" not in str(caught.value)
    assert snapshot(begun) == before


def test_the_experiment_that_a_refused_run_was_made_with_is_named(tmp_path, tokenizer):
    first = RunDirectory(tmp_path / "run", load_config(["experiment=quickstart"]))
    first.begin(tokenizer)
    first.lock.release()
    (first.path / "metrics.jsonl").touch()
    quickstart = RunDirectory(first.path, load_config(["wandb.mode=offline"]))
    quickstart.check()
    quickstart.lock.release()
    again = RunDirectory(first.path, load_config(["attention=standard"]))
    with pytest.raises(ConfigError, match=r"\), made with experiment=quickstart; choose another"):
        again.check()


def test_a_variant_without_fields_of_its_own_is_told_from_another_without(tmp_path, tokenizer):
    first = RunDirectory(tmp_path / "run", tiny("attention=standard"))
    first.begin(tokenizer)
    first.lock.release()
    (first.path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"another config \(.*attention"):
        RunDirectory(first.path, tiny("attention=diff_v2")).check()


FREE = [
    "log_interval=3",
    "wandb.mode=disabled",
    "checkpoint.interval=7",
    "checkpoint.keep_last=0",
    "eval.interval=7",
    "diagnostics.interval=0",
    "parallel.replicate=2",
    "parallel=hsdp",
    "micro_batch_size=2",
    "compile=false",
    "activation_checkpointing=true",
    "model.loss_chunk=64",
    "data.cache_dir=/elsewhere",
    "data.num_workers=0",
    "distributed.timeout=5",
    "run.name=another-name",
]


@pytest.mark.parametrize(
    "override", slow_but(["log_interval=3", "parallel=hsdp", "micro_batch_size=2"], FREE)
)
def test_what_does_not_change_the_result_may_change(begun, override):
    RunDirectory(begun, tiny(override)).check()


def test_a_run_goes_on_with_another_layout_of_its_values(tmp_path, tokenizer):
    """Those from before the device chose it say `wide`."""
    first = RunDirectory(tmp_path / "run", tiny("attention=diff_v1", "model.attention.values=wide"))
    first.begin(tokenizer)
    first.lock.release()
    (first.path / "metrics.jsonl").touch()
    again = tiny("attention=diff_v1")
    assert again.model.attention != first.cfg.model.attention
    RunDirectory(first.path, again).check()


MATCHED = ("attention=standard", "model.match_params_to=diff_v2")


@pytest.fixture
def matched(tmp_path: Path, tokenizer: Path) -> Path:
    """The directory of a run whose width was solved."""
    directory = RunDirectory(tmp_path / "matched", tiny(*MATCHED))
    directory.begin(tokenizer)
    (directory.path / "metrics.jsonl").write_text('{"step": 1}\n')
    directory.lock.release()
    return directory.path


def test_a_matched_run_goes_on_with_the_width_it_began_with(matched, monkeypatch):
    again = tiny(*MATCHED)
    RunDirectory(matched, again).check()
    monkeypatch.setattr(loading, "match", None)  # a saved width is not solved again
    saved = load_run_config(matched)
    assert saved == again
    assert (saved.run.matched.target_ffn_dim, saved.run.matched.target) == (384, "diff_v2")
    params = sum(p.numel() for p in build_model(saved.model).parameters())
    assert params == saved.run.matched.params
    assert saved.model.ffn_dim == saved.run.matched.ffn_dim > 384


OTHER_MATCHES = [
    (["attention=standard"], "model.ffn_dim: 432 there, 384 here"),
    (["attention=standard"], "model.match_params_to: diff_v2 there, None here"),
    (
        ["attention=standard", "model.match_params_to=gated_headwise"],
        "model.ffn_dim: 432 there",
    ),
    ([*MATCHED, "model.ffn_dim=512"], "model.ffn_dim: 432 there"),
]


@pytest.mark.parametrize(
    ("overrides", "key"),
    slow_but(OTHER_MATCHES[:2], OTHER_MATCHES),
)
def test_a_matched_run_with_another_width_or_target_is_refused(matched, overrides, key):
    with pytest.raises(ConfigError, match="is a run with another config") as caught:
        RunDirectory(matched, tiny(*overrides)).check()
    assert key in str(caught.value)


def test_resume_never_refuses_a_directory_that_holds_a_run(begun, tmp_path):
    before = snapshot(begun)
    with pytest.raises(ConfigError, match="resume=never"):
        RunDirectory(begun, tiny("resume=never")).check()
    assert snapshot(begun) == before
    RunDirectory(tmp_path / "fresh", tiny("resume=never")).check()


def test_a_directory_with_checkpoints_but_no_config_is_not_ours(begun):
    (begun / "config.yaml").unlink()
    before = snapshot(begun)
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        RunDirectory(begun, tiny()).check()
    assert snapshot(begun) == before


def test_beginning_again_keeps_the_tokenizer_and_drops_what_was_never_complete(begun, tmp_path):
    cut_short = begun / "checkpoints" / ".step-00000002.incomplete"
    cut_short.mkdir(parents=True)
    (cut_short / "part").touch()
    other = tmp_path / "other.model"
    other.write_bytes(b"other pieces")
    directory = RunDirectory(begun, tiny())
    directory.begin(other)
    assert (begun / "tokenizer.model").read_bytes() == b"pieces"
    assert not cut_short.exists()
    assert [path.name for path in directory.checkpoints] == ["step-00000001"]


def test_a_finished_run_says_so(begun):
    directory = RunDirectory(begun, tiny())
    assert ending(directory.path, directory.cfg) is None
    directory.finish({"steps": tiny().steps})
    assert ending(directory.path, directory.cfg) == {"steps": tiny().steps}
    directory.finish({"steps": tiny().steps - 1})
    assert ending(directory.path, directory.cfg) is None, "it was shorter"


def test_a_run_that_diverged_and_stopped_has_ended_until_its_settings_are_others(begun):
    directory = RunDirectory(begun, tiny())
    directory.finish({"steps": 3, "stopped": "skipped"})
    assert ending(directory.path, directory.cfg)["steps"] == 3
    assert read_summary(begun) is None
    directory.cfg = tiny("log_interval=1", "checkpoint.interval=2")
    assert ending(directory.path, directory.cfg), "nothing that helps"
    others = (
        "train.max_consecutive_skips=21",
        "optim.lr=1",
        "data.paths=[a]",
        "run.allow_changes=[corpus]",
    )
    for other in others:
        directory.cfg = tiny(other)
        assert ending(directory.path, directory.cfg) is None, other


@pytest.mark.parametrize("change", ["steps=30", "seed=1"])
def test_a_finished_run_is_neither_shortened_nor_made_otherwise(begun, change):
    directory = RunDirectory(begun, tiny("run.allow_changes=[steps,optim,eval,seed]", change))
    directory.finish({"steps": directory.cfg.steps if change == "seed=1" else 70})
    before = snapshot(begun)
    with pytest.raises(ConfigError, match=r"has made \d+ steps, and nothing of it"):
        directory.check()
    assert snapshot(begun) == before


def test_a_run_beside_those_of_a_sweep_needs_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = tiny("run.name=null", "run.sweep=first")
    assert choose_path(cfg).parent == Path("outputs/first")
    Path("outputs/first").mkdir(parents=True)
    Path("outputs/first/sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.sweep=first is a sweep: -m goes on"):
        choose_path(cfg)
    assert choose_path(tiny("run.sweep=first")) == Path("outputs/first/a-run")


# Whether it may be used


@pytest.mark.slow
def test_a_directory_in_use_by_another_process_is_refused(tmp_path):
    held = RunDirectory(tmp_path / "run", tiny())
    script = (
        "import sys; from pathlib import Path; from diffllm import load_config\n"
        "from diffllm.training.directory import RunDirectory\n"
        "RunDirectory(Path(sys.argv[1]), load_config(['model=tiny']))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert f"is in use by process {os.getpid()} on " in refused.stderr
    assert "InUseError" in refused.stderr
    held.lock.release()
    RunDirectory(tmp_path / "run", tiny()).lock.release()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\)"):
        RunDirectory(tmp_path / "file" / "run", tiny())
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory(tmp_path / "file", tiny())
    assert (tmp_path / "file").read_text() == "not a directory"


def test_a_directory_on_a_read_only_file_system_is_refused():
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory(Path("/proc/sys/run"), tiny())


def test_a_directory_whose_lock_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory(tmp_path / "run", tiny())


# config.yaml


@pytest.mark.parametrize("variant", slow_but(families(VARIANTS), VARIANTS))
def test_config_yaml_gives_back_the_config_and_an_identical_model(tmp_path, tokenizer, variant):
    cfg = tiny(
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
    RunDirectory(tmp_path / "run", cfg).begin(tokenizer)
    again = load_run_config(tmp_path / "run")
    assert again == cfg
    assert type(again.model.attention) is type(cfg.model.attention)
    first, second = build_model(cfg.model).state_dict(), build_model(again.model).state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_fields_of_a_variant_come_back(tmp_path, tokenizer):
    cfg = tiny("attention=gated", "model.attention.gate=headwise")
    RunDirectory(tmp_path / "run", cfg).begin(tokenizer)
    assert load_run_config(tmp_path / "run") == cfg
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["attention"] == {
        "backend": "sdpa",
        "context_scale": 1.0,
        "gate": "headwise",
    }


def test_config_yaml_does_not_depend_on_later_defaults_or_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFLLM_CACHE", "/cache-one")
    tokenizer = tmp_path / "t.model"
    tokenizer.touch()
    RunDirectory(tmp_path / "run", tiny("seq_len=64")).begin(tokenizer)
    monkeypatch.setenv("DIFFLLM_CACHE", "/cache-two")
    again = load_run_config(tmp_path / "run")
    assert again.data.cache_dir == "/cache-one"
    assert again.model.seq_len == 64


def saved_text(tmp_path: Path) -> str:
    tokenizer = tmp_path / "t.model"
    tokenizer.touch()
    RunDirectory(tmp_path / "saved", tiny()).begin(tokenizer)
    return (tmp_path / "saved" / "config.yaml").read_text()


FOREIGN = {
    "another program's": b"learning_rate: 0.1\nmodel: gpt2\n",
    "a config of hydra's": b"run:\n  dir: /tmp\n",
    "an unknown variant": b"run: {choices: {attention: nonsense}}\n",
    "a variant that is a path": b"run: {choices: {attention: ../../etc/passwd}}\n",
    "a variant that is an override": b"run: {choices: {attention: 'standard,diff_v2'}}\n",
    "a variant that is a mapping": b"run: {choices: {attention: {a: 1}}}\n",
    "no variant": b"run: {choices: {attention: null}}\n",
    "choices that are a list": b"run: {choices: [1]}\n",
    "an unknown key": b"run: {choices: {attention: standard}}\nmodel: {foo: 1}\n",
    "a wrong type": b"run: {choices: {attention: standard}}\nmodel: {dim: wide}\n",
    "a missing interpolation": b"run: {choices: {attention: standard}}\nseed: ${nowhere}\n",
    "an interpolation of itself": b"run: {choices: {attention: standard}}\nseed: ${seed}\n",
    "an unknown resolver": b"run: {choices: {attention: standard}}\nseed: ${py:1+1}\n",
    "a bad interpolation": b"run: {choices: {attention: '${'}}\n",
    "a target": b"run: {choices: {attention: standard}}\nmodel: {_target_: os.system}\n",
    "a match that is a number": b"run: {choices: {attention: standard}, matched: 17}\n",
    "half a match": b"run: {choices: {attention: standard}, matched: {target: gated}}\n",
    "a model that is a number": b"run: {choices: {attention: standard}}\nmodel: 17\n",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_config_yaml_is_one_error_line(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_run_config(tmp_path)
    assert "config.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_of_another_version_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text(saved_text(tmp_path) + "from_the_future: 1\n")
    with pytest.raises(CheckpointError, match="from_the_future"):
        load_run_config(tmp_path)


def test_a_directory_without_config_yaml_is_not_a_run(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="is not a run directory"):
            load_run_config(path)


# Where a start continues


def test_what_resume_means(tmp_path):
    own = [write_checkpoint(tmp_path / "own" / "checkpoints", step) for step in (100, 20)][::-1]
    other = [write_checkpoint(tmp_path / "other" / "checkpoints", step) for step in (5, 9)]
    assert resume_checkpoint(tiny("resume=auto"), []) is None
    assert resume_checkpoint(tiny("resume=auto"), own) == own[-1]
    assert resume_checkpoint(tiny("resume=never"), []) is None
    for path in (tmp_path / "other", tmp_path / "other" / "checkpoints", other[-1]):
        assert resume_checkpoint(tiny(f"resume={path}"), []) == other[-1]
    assert resume_checkpoint(tiny(f"resume={other[0]}"), []) == other[0]
    # a requeued job that was started from elsewhere goes on with its own
    assert resume_checkpoint(tiny(f"resume={other[0]}"), own) == own[-1]


def test_resume_from_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "empty").mkdir(parents=True)
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            resume_checkpoint(tiny(f"resume={path}"), [])


def test_a_path_that_is_no_run_is_answered_by_those_that_could_be_meant(tmp_path, tokenizer):
    sweep = tmp_path / "outputs" / "compare"
    RunDirectory(sweep / "standard-seed0", tiny()).begin(tokenizer)
    for path, said in (
        (sweep, "it has no config.yaml; it has the runs standard-seed0"),
        (sweep.parent / "compar", "it does not exist"),
        (tmp_path / "nowhere" / "run", "it does not exist"),
    ):
        with pytest.raises(CheckpointError) as caught:
            load_run_config(path)
        assert str(caught.value) == f"{path} is not a run directory: {said}"
