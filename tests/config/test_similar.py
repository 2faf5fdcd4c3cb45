"""Fast reading of many similar configs."""

import pytest
from runs.written import config_yaml, edit_text

from diffllm.config import similar
from diffllm.config.saved import load_run_config
from diffllm.config.similar import SimilarConfigs
from diffllm.core.errors import CheckpointError


@pytest.fixture
def similar_runs(tmp_path):
    """Create runs that differ in seed, learning rate and directory."""
    text = config_yaml(("attention=diff_v2", "run.dir=outputs/x", "run.study=ab/deciding/v2"))
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        own = text.replace("outputs/x", f"outputs/{name}").replace(
            "lr: 0.002", f"lr: {len(name)}.5"
        )
        own = own.replace("seed: 0", f"seed: {ord(name)}")
        (tmp_path / name / "config.yaml").write_text(own, encoding="utf-8")
    return tmp_path


def test_run_configs_are_parsed_once_if_only_seeds_differ(similar_runs, monkeypatch):
    read = []
    monkeypatch.setattr(
        similar, "load_run_config", lambda run: read.append(run) or load_run_config(run)
    )
    configs = SimilarConfigs()
    found = [configs.load(similar_runs / name) for name in ("a", "b", "c")]
    assert len(read) == 1
    assert found == [load_run_config(similar_runs / name) for name in ("a", "b", "c")]
    assert [cfg.seed for cfg in found] == [97, 98, 99]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 98", "seed: 0x10"),
        ("run:\n", "run:\n  dir: other/x\n"),
        ("dir: outputs/b", "dir: null"),
        ("dir: outputs/b", "dir: outputs/b\n    and more"),
        ("study: ab/deciding/v2", "study: '1'"),
        ("clip_norm: 1.0", "clip_norm: 2.0"),
        ("init_seed: 98", "init_seed: -1"),
        ("init_seed: 98", "init_seed: seed"),
    ],
)
def test_similar_configs_matches_load_run_config_if_a_config_is_edited(similar_runs, old, new):
    edit_text(similar_runs / "b" / "config.yaml", old, new)
    configs = SimilarConfigs()
    configs.load(similar_runs / "a")
    outcomes = []
    for load in (configs.load, load_run_config):
        try:
            outcomes.append(load(similar_runs / "b"))
        except CheckpointError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
