"""Errors for removed keys name the replacement; saved configs with the default value load."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from runs.json_files import write_json

from diffllm.cli import main
from diffllm.compare.sweep.plan import plan_sweep, split_overrides
from diffllm.config import compose, load_config
from diffllm.config.overrides import REMOVED_KEYS, Removed
from diffllm.config.saved import load_run_config
from diffllm.core.errors import CheckpointError, ConfigError

REAL = dict(REMOVED_KEYS)
OLD = {"prepare.old": 1, "data.old": None, "model.old": "a", "old": {"inner": 2}}


@pytest.fixture(autouse=True)
def registered_removed_keys(workplace, monkeypatch):
    """Register removed keys for the tests, and reset the added YAML directories."""
    monkeypatch.setattr("diffllm.config.plugins._DIRECTORIES", [])
    for key, default in OLD.items():
        monkeypatch.setitem(REMOVED_KEYS, key, Removed(default, "use something else"))


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("prepare.old=2", "prepare.old"),
        ("~prepare.old", "prepare.old"),
        ("prepare={old: 2}", "prepare.old"),
        ("+model.old=b", "model.old"),
        ("old={inner: 3}", "old"),
    ],
)
@pytest.mark.parametrize("command", ["train", "prepare"])
def test_command_prints_single_error_line_if_override_sets_removed_key(word, key, command, capsys):
    assert main([command, "model=tiny", word, "steps=1"]) == 2
    assert capsys.readouterr() == ("", f"error: {key} was removed; use something else\n")


@pytest.mark.parametrize("key", REAL)
def test_removed_config_key_with_default_value_is_refused_as_override(key):
    with pytest.raises(ConfigError, match=rf"^{key} was removed; {re.escape(REAL[key].instead)}$"):
        load_config([f"{key}={json.dumps(REAL[key].default)}"])
    run = write_changed_config(**{key.replace(".", "__"): REAL[key].default})
    assert load_run_config(run) == load_config(["model=tiny"])


@pytest.mark.parametrize(("before", "now"), [(True, "full"), (False, "none")])
def test_saved_config_with_former_value_of_checkpointing_loads(before, now):
    run = write_changed_config(activation_checkpointing=before)
    assert load_run_config(run).activation_checkpointing.name == now


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "run=a", "wandb=true"], "wandb= was removed; take the scores from --json"),
        (["study", "run", "a.yaml", "out=b", "probe=false"], "probe= was removed; name finished"),
    ],
)
def test_error_for_removed_argument_mentions_replacement(words, said, error_of):
    assert error_of(*words).startswith(f"error: {said}")


def test_error_for_removed_key_mentions_experiment_that_sets_the_key():
    file = Path("mine/experiment/x.yaml")
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\nprepare:\n  old: 2\n", encoding="utf-8")
    said = r"^experiment=x: prepare\.old was removed; use something else$"
    with pytest.raises(ConfigError, match=said):
        load_config(["experiment=x"], config_dir="mine")


def test_removed_key_in_data_recipe_or_sweep_raises_config_error():
    write_json(Path("r.yaml"), {"source": "files", "paths": ["a.txt"], "old": True})
    with pytest.raises(ConfigError, match=r"^data\.old was removed; use something else$"):
        load_config(["data=r.yaml"])
    swept = split_overrides(["model=tiny", "run.sweep=mine", "prepare.old=1,2"])[0]
    cfg = load_config(["model=tiny"])
    cfg.prepare.old = 2  # type: ignore[attr-defined]
    for check in (lambda: plan_sweep(swept, 1), lambda: compose.checked(cfg)):
        with pytest.raises(ConfigError, match=r"^prepare\.old was removed; use something else$"):
            check()


def write_changed_config(**changes: Any) -> Path:
    """Write config.yaml of a run with some changed values; return the directory."""
    content = OmegaConf.to_container(
        OmegaConf.structured(load_config(["model=tiny"])), enum_to_str=True
    )
    assert isinstance(content, dict)
    for key, value in changes.items():
        *sections, name = key.split("__")
        inner = content
        for section in sections:
            inner = inner[section]
        inner[name] = value
    Path("config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return Path()


def test_load_run_config_ignores_removed_keys_with_default_values(capsys):
    run = write_changed_config(prepare__old=1, data__old=None, model__old="a", old={"inner": 2})
    assert load_run_config(run) == load_config(["model=tiny"])
    assert capsys.readouterr() == ("", "")


def test_load_run_config_accepts_removed_key_as_value_of_allow_changes():
    cfg = load_run_config(write_changed_config(run__allow_changes=["data.old"]))
    assert cfg.run.allow_changes == ["data.old"]


def test_load_run_config_refuses_non_default_value_of_removed_key():
    said = "config.yaml is not a config of this version: prepare.old=2 was removed; use something"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load_run_config(write_changed_config(prepare__old=2))
