"""Configs of many runs that differ in few values."""

from pathlib import Path

import pytest
from runs.written import config_yaml

from diffllm.config import saved
from diffllm.config.saved import load_run_config, parse_config
from diffllm.config.schema import TrainConfig
from diffllm.core.errors import CheckpointError


@pytest.fixture
def similar_runs(tmp_path):
    """Create runs that differ in seed, learning rate, name and directory."""
    text = config_yaml(("attention=diff_v2", "run.dir=outputs/x", "run.study=ab/deciding/v2"))
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        own = text.replace("outputs/x", f"outputs/{name}").replace(
            "lr: 0.002", f"lr: {len(name)}.5"
        )
        own = own.replace("seed: 0", f"seed: {ord(name)}")
        own = own.replace("run:\n  name: null", f"run:\n  name: v2-seed{ord(name)}")
        (tmp_path / name / "config.yaml").write_text(own, encoding="utf-8")
    return tmp_path


def plainly_loaded(run: Path) -> TrainConfig:
    file = run / "config.yaml"
    return parse_config(file, file.read_text(encoding="utf-8"))


def edit(run: Path, old: str, new: str):
    text = (run / "config.yaml").read_text(encoding="utf-8")
    assert text.count(old)
    (run / "config.yaml").write_text(text.replace(old, new), encoding="utf-8")


def test_run_configs_are_parsed_once_if_only_seed_rate_or_name_differ(similar_runs, monkeypatch):
    files = []
    monkeypatch.setattr(saved, "PARSED", {})
    monkeypatch.setattr(
        saved, "parse_config", lambda file, text: files.append(file) or parse_config(file, text)
    )
    paths = [similar_runs / name for name in ("a", "b", "c")]
    configs = [load_run_config(path) for path in paths]
    assert len(files) == 1
    assert configs == [plainly_loaded(path) for path in paths]
    assert [cfg.seed for cfg in configs] == [97, 98, 99]


def test_change_of_a_loaded_config_does_not_affect_the_next_load(similar_runs):
    load_run_config(similar_runs / "a").model.attention.context_scale = 7.0
    assert load_run_config(similar_runs / "a") == plainly_loaded(similar_runs / "a")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 98", "seed: 0x10"),
        ("\nseed: 98\n", "\nseed: 98\n  7\n"),
        ("run:\n", "run:\n  dir: other/x\n"),
        ("dir: outputs/b", "dir: null"),
        ("dir: outputs/b", "dir: outputs/b\n    and more"),
        ("name: v2-seed98", "name: on"),
        ("name: v2-seed98", "name: 1e3"),
        ("study: ab/deciding/v2", "study: '1'"),
        ("lr: 1.5", "lr: 0.0"),
        ("clip_norm: 1.0", "clip_norm: 2.0"),
        ("init_seed: 98", "init_seed: -1"),
        ("init_seed: 98", "init_seed: seed"),
    ],
)
def test_load_run_config_matches_plain_loading_if_a_config_is_edited(similar_runs, old, new):
    edit(similar_runs / "b", old, new)
    load_run_config(similar_runs / "a")
    outcomes = []
    for load in (load_run_config, plainly_loaded):
        try:
            outcomes.append(load(similar_runs / "b"))
        except CheckpointError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
