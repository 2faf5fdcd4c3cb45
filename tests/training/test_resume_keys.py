"""Each config key may change at a resume as its declaration says."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from diffllm import load_config
from diffllm.config import TrainConfig, saved
from diffllm.config.saved import load_run_config
from diffllm.core.bounds import sections
from diffllm.core.errors import ConfigError
from diffllm.core.keys import declarations
from diffllm.training.run_directory import RunDirectory

SOURCES = "data.sources={web: {source: files, paths: [a.txt]}}"
CONFIGS = {
    "a mixture": ["model=tiny", "attention=gated", "data=mixture", SOURCES],
    "experts": ["model=moe_tiny", "attention=diff_v1", "data=synthetic"],
    "a matched model": ["model=tiny", "attention=standard", "model.match_params_to=diff_v2"],
}


def begin_run(path: Path, cfg: TrainConfig) -> Path:
    """Create a run with one logged step."""
    tokenizer = path.with_suffix(".model")
    tokenizer.write_bytes(b"pieces")
    directory = RunDirectory(path, deepcopy(cfg))
    directory.check()
    directory.begin(tokenizer)
    (path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    directory.lock.release()
    return path


def resume_error(run: Path, cfg: TrainConfig) -> str | None:
    """Return the error of a resume with this config, or None if the run can resume."""
    directory = RunDirectory(run, cfg)
    try:
        directory.check()
    except ConfigError as error:
        return str(error)
    finally:
        directory.lock.release()
    return None


def other_value(declared: Any, value: Any) -> Any:
    """Return a value other than `value`, of the declared type."""
    if isinstance(value, Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}-other"
    if isinstance(value, list):
        return [*value, "other"]
    if isinstance(value, dict):
        return {**value, "other": "other"}
    return 3 if {int, float} & set(get_args(declared)) else "other"


def with_other_value(cfg: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Yield (dotted key, copy of `cfg` with another value of this key) for all keys."""
    for prefix, section in sections(cfg):
        hints = get_type_hints(type(section))
        for config_field in fields(section):
            name = config_field.name
            value = getattr(section, name)
            if is_dataclass(value):
                continue
            changed = deepcopy(cfg)
            setattr(dict(sections(changed))[prefix], name, other_value(hints[name], value))
            yield f"{prefix}{name}", changed


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_may_change_at_resume_if_and_only_if_declared(tmp_path, monkeypatch, name):
    cfg = load_config(CONFIGS[name])
    run = begin_run(tmp_path / "run", cfg)
    monkeypatch.setattr(saved, "load_run_config", cache(load_run_config))
    declared = declarations(cfg)
    refused = {}
    for key, changed in with_other_value(cfg):
        error = resume_error(run, changed)
        if error is not None:
            assert f"{key}: " in error or f"{key}." in error
            refused[key] = error
    assert refused.keys() == {key for key, found in declared.items() if not found.resumable}
    assert {"seed", "steps", "optim.lr", "data.packing", "resolved.schemas"} <= refused.keys()


def test_paths_of_mixture_and_name_of_attention_yaml_may_change_at_resume(tmp_path):
    """Corpora are compared by content, and variants by class and values."""
    cfg = load_config(CONFIGS["a mixture"])
    run = begin_run(tmp_path / "run", cfg)
    cfg.data.sources["web"].paths = ["elsewhere/a.txt"]
    cfg.resolved.choices["attention"] = "my_gated"
    assert resume_error(run, cfg) is None
    cfg.data.sources["web"].weight = 2
    assert "data.sources.web.weight: 1.0 in the run" in str(resume_error(run, cfg))


@pytest.mark.parametrize("name", CONFIGS)
def test_config_with_computed_values_in_section_run_loads_and_resumes(tmp_path, name):
    """Older versions saved choices, schemas and matched next to the name of the run."""
    cfg = load_config([*CONFIGS[name], "run.sweep=mine"])
    run = begin_run(tmp_path / "run", cfg)
    content = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    computed = content.pop("resolved")
    del computed["defaults"]
    content["run"] |= computed
    (run / "config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert load_run_config(run) == cfg
    assert resume_error(run, cfg) is None
    cfg.seed = 5
    assert "seed: 0 in the run, 5 in this command" in str(resume_error(run, cfg))
