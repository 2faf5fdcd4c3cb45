"""A checkpoint with a changed and newly signed state is either usable or skipped."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from damage import BOMB, damaged, edited, outcome, try_all
from runs.json_files import read_json, write_json
from runs.one_rank import sign, write_checkpoint
from tiers import slow_but

from diffllm.checkpoint.manifest import faults, read_manifest, read_state
from diffllm.checkpoint.reader import load_tensors
from diffllm.checkpoint.run_checkpoints import newest_good
from diffllm.cli import main
from diffllm.compare.study.file import load_study
from diffllm.config.saved import load_run_config
from diffllm.config.words import with_recipe
from diffllm.config.yaml_file import MOST_NODES, read_yaml
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.training.state import LoopState


@pytest.fixture
def run(trained, tmp_path):
    """Return a run with a good checkpoint of step 1, and one of step 3 for tests to damage."""
    run = shutil.copytree(trained, tmp_path / "run")
    write_checkpoint(run / "checkpoints", 1)
    return run


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000003"


def chosen(run: Path) -> str:
    path = newest_good([run / "checkpoints" / "step-00000001", newest(run)])
    assert path
    return path.name


def assert_usable(path: Path) -> None:
    """Assert that a run can resume from the state, or start from its parameters."""
    saved = read_state(path)
    if saved["loop"] is None:  # The checkpoint contains only parameters.
        return
    state = LoopState.of(saved["loop"])
    state.spikes.update(1.0, 1.0)
    assert state.step == saved["step"] >= 0
    assert saved["ranks"] >= 1
    json.dumps(state.state_dict()).encode()


@pytest.mark.fuzz
def test_forged_state_json_is_rejected_or_loaded_safely(run):
    path, file = newest(run), newest(run) / "state.json"

    def check(content: bytes) -> None:
        file.write_bytes(content)
        sign(path)
        if not faults(path):
            assert_usable(path)

    state = read_json(file)
    spikes = edited(state["loop"]["spikes"]).map(json.loads)
    states = spikes.map(lambda new: {**state, "loop": {**state["loop"], "spikes": new}})
    try_all(check, edited(state) | states.map(lambda new: json.dumps(new).encode()), 80)


def norm_of(path: Path) -> dict[str, torch.Tensor]:
    return {"model.norm.weight": torch.empty(read_state(path)["parameters"]["norm.weight"])}


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["manifest.json", "state.json", ".metadata", "__0_0.distcp"])
def test_damage_to_any_checkpoint_file_is_detected(run, name):
    path, file, whole = newest(run), newest(run) / name, read_manifest(newest(run))
    real, tensors = file.read_bytes(), norm_of(path)

    def read() -> list[str]:
        found = faults(path)
        if not found and read_manifest(path) != whole:  # The manifest lists fewer files.
            with pytest.raises(CheckpointError):
                load_tensors(path, tensors, no_dist=True)
        return found

    def check(content: bytes) -> None:
        assert outcome(read, file, content) or name == "manifest.json" or content == real

    kinds = edited(json.loads(real)) if name == "manifest.json" else damaged(real)
    try_all(check, damaged(real) | kinds, 60)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_forged_tensor_file_is_rejected_or_loaded_safely(run, name):
    """A forger can change numbers, but cannot run code or cause an unexpected error."""
    path, file, tensors = newest(run), newest(run) / name, norm_of(newest(run))

    def check(content: bytes) -> None:
        file.write_bytes(content)
        sign(path)
        outcome(lambda: load_tensors(path, tensors, no_dist=True), file, content, path)

    try_all(check, damaged(file.read_bytes()), 25)


MISSING = object()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, MISSING) for name in ("step", "data", "order", "spikes", "compiled")),
        *(("compiled", 1), ("mkl_mode", 5), ("mkl_mode", "AVX2\0"), ("mkl_mode", None)),
        *(("visible_keys", value) for value in (None, {"keys": "9"}, {"keys": 2, "queries": 3})),
        *(("tokens", value) for value in (None, -1, "9")),
        *(("training_flops", value) for value in (-1.0, "9", math.nan)),
    ],
)
def test_state_json_with_missing_or_invalid_field_is_rejected(run, name, value):
    file = newest(run) / "state.json"
    content = read_json(file)
    content["loop"][name] = value
    if value is MISSING:
        del content["loop"][name]
    write_json(file, content)
    sign(newest(run))
    assert faults(newest(run)) == [f"loop.{name} in state.json is missing or invalid"]
    assert chosen(run) == "step-00000001"


def test_renamed_checkpoint_directory_is_rejected(run, capfd):
    newest(run).rename(run / "checkpoints" / "step-00000007")
    (fault,) = faults(run / "checkpoints" / "step-00000007")
    assert fault == "manifest.json has step 3, but the directory name has 7"
    assert main(["checkpoints", f"run={run}"]) == 1
    assert "has step 3" in capfd.readouterr().out
    paths = [run / "checkpoints" / f"step-{step:08d}" for step in (1, 7)]
    assert newest_good(paths) == paths[0]


def test_state_json_with_wrong_step_is_rejected(run):
    file = newest(run) / "state.json"
    file.write_text(
        file.read_text(encoding="utf-8").replace('"step": 3', '"step": 2'), encoding="utf-8"
    )
    sign(newest(run))
    assert faults(newest(run)) == ["state.json has step 2, but the directory name has 3"]


def test_run_config_with_yaml_alias_bomb_is_refused(run, capfd):
    file = run / "config.yaml"
    file.write_text(BOMB + file.read_text(encoding="utf-8"), encoding="utf-8")
    said = f"config.yaml has more than {MOST_NODES:,} keys and values"
    with pytest.raises(CheckpointError, match=said):
        load_run_config(run)
    for words in (["generate", "prompt=a"], ["consolidate"]):
        assert main([words[0], f"run={run}", *words[1:]]) == 2
        assert said in capfd.readouterr().err


READERS = [load_study, lambda path: with_recipe(f"data={path}"), read_yaml]


@pytest.mark.parametrize("read", slow_but([load_study], READERS))
def test_yaml_file_with_alias_bomb_is_refused_by_every_yaml_reader(tmp_path, read):
    file = tmp_path / "file.yaml"
    file.write_text(BOMB, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"has more than {MOST_NODES:,} keys and values"):
        read(file)
    file.write_text("a: &a [*a]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has the alias a before its value is complete"):
        read(file)
    file.write_text(f"a: {'[' * 100_000}", encoding="utf-8")
    with pytest.raises(ConfigError, match="is nested too deeply"):
        read(file)
