"""Unusable paths, for every key and argument that is a path: one error line with the name."""

import dataclasses
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from runs.command import changes, refusal_of, snapshot, tool, train
from tiers import slow_but

from diffllm import load_config
from diffllm.cli import COMMANDS, module_of_command
from diffllm.config.values import leaves
from diffllm.core.errors import ConfigError
from diffllm.core.keys import declarations

NO_PATHS = {
    "run.name", "run.sweep", "run.study", "run.allow_changes", "run.swept", "plugins",
    "model.match_params_to", "model.match_flops_to", "data.source", "data.text_column",
    "data.prompt_column", "data.name", "data.data_dir", "data.split", "data.revision",
    "data.sample_prompt", "data.eos_token", "wandb.project", "wandb.entity", "wandb.group",
    "wandb.mode", "wandb.tags", "wandb.alerts", "checkpoint.interval", "eval.suites",
    "resolved.defaults",
}  # fmt: skip
"""Keys of text that are not paths; each new key of text must be here or have kind="path"."""


def unusable_paths(place: Path) -> dict[str, str]:
    """Create files, links and directories in `place`; return unusable paths by description."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "file").write_text("a file", encoding="utf-8")
    if not (place / "loop").is_symlink():
        (place / "loop").symlink_to("loop")
    (place / "forbidden").mkdir(exist_ok=True)
    (place / "forbidden").chmod(0)
    found = {
        "an unknown user": "~nosuchuser/run",
        "a name that is too long": f"{place}/missing/{'n' * 300}/run",
        "characters of many bytes": f"{place}/{'ä' * 200}",
        "a path that is too long": f"{place}{'/name' * 1000}",
        "through a file": f"{place}/file/run",
        "a loop": f"{place}/loop",
        "bytes that are no text": f"{place}/\udcff",
    }
    if os.geteuid():  # root can enter every directory
        found["a forbidden directory"] = f"{place}/forbidden/run"
    return found


CONFIG = load_config(["model=tiny"])


def keys_of_text() -> Iterator[str]:
    for key, declared, _ in leaves(CONFIG):
        kinds = {declared, *get_args(declared)}
        if str in kinds and get_origin(declared) is not dict:
            yield key


def is_path(key: str) -> bool:
    return "path" in declarations(CONFIG)[key].kinds


def arguments_of(command: str) -> list["dataclasses.Field[Any]"]:
    """Return the fields of a command's arguments; empty for a command that takes a config."""
    module = importlib.import_module(module_of_command(command))
    own = f"{command.title().replace('-', '')}Arguments"
    return list(dataclasses.fields(getattr(module, own))) if hasattr(module, own) else []


def arguments() -> Iterator[tuple[str, str]]:
    for command in COMMANDS:
        for field in arguments_of(command):
            if field.metadata.get("path"):
                yield command, field.name


KEYS = sorted(filter(is_path, keys_of_text()))
OTHERS = {
    "prompt": "a", "entity": "e", "project": "p", "gap": "0.1", "out": "out", "hf": "model",
}  # fmt: skip


def test_every_config_key_of_string_type_is_classified_as_path_or_text():
    for key in keys_of_text():
        assert is_path(key) != (key in NO_PATHS), key
    assert set(KEYS) > {"run.dir", "data.paths", "data.cache_dir", "data.tokenizer", "resume"}


def test_every_path_argument_of_commands_is_declared_as_path():
    marked = set(arguments())
    assert {("generate", "run"), ("consolidate", "out"), ("power", "pilot")} < marked
    for command in COMMANDS:
        names = {field.name for field in arguments_of(command)}
        for name in names & {"run", "out", "pilot", "config_dir", "dir", "file"}:
            assert (command, name) in marked


def path_overrides(key: str, path: str) -> list[str]:
    value = f"['{path}']" if key == "data.paths" else f"'{path}'"
    more = {"data.paths": ["data=files"], "data.dataset": ["data=hub"]}
    return ["model=tiny", *more.get(key, []), f"{key}={value}"]


def test_load_config_refuses_unusable_path_in_data_source_or_environment(monkeypatch):
    mixture = "data.sources={code: {source: files, paths: ['~nosuchuser/*.jsonl']}}"
    with pytest.raises(ConfigError, match=r"data\.sources\.code\.paths=~nosuchuser/\*"):
        load_config(["model=tiny", "data=mixture", mixture])
    monkeypatch.setenv("DIFFLLM_CACHE", "~nosuchuser/cache")
    with pytest.raises(ConfigError, match="DIFFLLM_CACHE=~nosuchuser/cache cannot be used"):
        load_config(["model=tiny"])


def test_load_run_config_accepts_unusable_tokenizer_path(finished_run, tmp_path):
    from diffllm.config.saved import load_run_config

    text = (finished_run / "config.yaml").read_text(encoding="utf-8")
    before, _, after = text.partition("\n  tokenizer: null\n")
    assert after
    (tmp_path / "config.yaml").write_text(
        f"{before}\n  tokenizer: ~nosuchuser/tokenizer.model\n{after}", encoding="utf-8"
    )
    assert load_run_config(tmp_path).data.tokenizer == "~nosuchuser/tokenizer.model"


@pytest.mark.parametrize("key", slow_but(["run.dir", "resume"], KEYS))
def test_error_of_train_contains_config_key_of_unusable_path(tmp_path, environment, key, rng):
    (tmp_path / "work").mkdir()
    paths = unusable_paths(tmp_path / "places")
    for what, path in paths.items():
        with pytest.raises(ConfigError) as caught:
            load_config(path_overrides(key, path))
        assert key in str(caught.value), what
    what, path = rng.choice(list(paths.items()))
    before = snapshot(tmp_path)
    words = [*path_overrides(key, path), "wandb.mode=disabled"]
    result = train(words, tmp_path / "work", environment)
    assert key in refusal_of(result), what
    assert not changes(before, snapshot(tmp_path))


def assert_refused(words, start, tmp_path, environment):
    (tmp_path / "work").mkdir()
    for what, path in unusable_paths(tmp_path / "places").items():
        given = [word.replace("PATH", path) for word in words]
        before = snapshot(tmp_path)
        result = tool(given, tmp_path / "work", environment)
        assert refusal_of(result).startswith(start), what
        assert not changes(before, snapshot(tmp_path)), what


@pytest.mark.parametrize(("command", "name"), slow_but([("generate", "run")], arguments()))
def test_command_error_contains_argument_name_of_unusable_path(
    finished_run, tmp_path, environment, command, name
):
    others = {"run": str(finished_run), **OTHERS}
    names = [field.name for field in arguments_of(command)]
    needed = [f"{other}={others[other]}" for other in names if other != name and other in others]
    words = [command, *needed, f"{name}=PATH"]
    assert_refused(words, f"error: {name}=", tmp_path, environment)


POSITIONS = {
    "report": ["report", "PATH"],
    "study": ["study", "verdict", "PATH", "out=x"],
    "study out": ["study", "verdict", "../study.yaml", "out=PATH"],
    "recipe": ["count", "data=PATH.yaml"],
    "config-dir": ["count", "--config-dir", "PATH"],
}


@pytest.mark.parametrize("name", slow_but(["report"], POSITIONS))
def test_command_refuses_unusable_positional_path(tmp_path, environment, name):
    (tmp_path / "study.yaml").write_text(
        "claim: c\nbase: []\narms: {a: [], b: []}\nbaseline: a\nseeds: [0, 1]\n"
        "rule: {kind: difference, arm: b, against: a, below: 0}\n",
        encoding="utf-8",
    )
    assert_refused(POSITIONS[name], "error: ", tmp_path, environment)
