"""Typed config: composition of YAMLs, derived values, and errors."""

import re
from copy import deepcopy
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType

import pytest
from tiers import families, slow_but

from diffllm import load_config
from diffllm.config import Precision, TrainConfig
from diffllm.config.compose import variant_config, variants
from diffllm.config.plugins import config_directory
from diffllm.core.errors import ConfigError
from diffllm.metrics.wandb_config import WandbMode
from diffllm.model.attention.base import AttentionConfig
from diffllm.optim import Schedule

CONF = config_directory()
FILES = sorted(path for path in CONF.glob("*/*.yaml") if path.parent.name != "study")
NOT_VARIANTS = [path for path in FILES if path.parent.name != "attention"]
NEEDED = {  # required keys of a choice
    ("data", "files"): ["data.paths=[corpus.txt]"],
    ("data", "hub"): ["data.dataset=owner/name"],
    ("data", "mixture"): ["data.sources={a: {}}"],
    ("data", "tokens"): ["data.paths=[a.bin]", "data.tokenizer=t.model"],
}


def plain_tree(node: object) -> bool:
    """Return whether a tree contains only dataclasses and plain values, no OmegaConf objects."""
    if is_dataclass(node):
        return all(plain_tree(getattr(node, f.name)) for f in fields(node))
    if isinstance(node, list):
        return type(node) is list and all(plain_tree(item) for item in node)
    if isinstance(node, dict):
        return type(node) is dict and all(plain_tree(item) for item in node.values())
    return isinstance(node, int | float | str | Enum | NoneType)


def test_load_config_converts_omegaconf_nodes_to_typed_dataclasses():
    cfg = load_config(
        ["model=tiny", "attention=gated", "optim=wsd", "precision=bf16", "wandb.mode=offline"]
    )
    assert type(cfg) is TrainConfig
    assert plain_tree(cfg)
    assert cfg.precision is Precision.bf16
    assert cfg.optim.schedule is Schedule.wsd
    assert cfg.wandb.mode is WandbMode.offline
    assert isinstance(cfg.optim.lr, float)
    assert cfg.data.paths == []


@pytest.mark.parametrize(
    ("experiment", "length"),
    [("long_7b", 65_536), ("long_30a3_32k", 32_768), ("long_30a3_64k", 65_536)],
)
def test_recipe_for_long_context_fits_64_ranks(experiment, length):
    cfg = load_config([f"experiment={experiment}", "attention=diff_v2"])
    cfg.check_world(64)
    assert (cfg.seq_len, cfg.parallel.context) == (length, 8)
    assert cfg.global_batch_size * length == 2**22


def test_load_config_without_overrides_returns_config_of_quickstart_experiment():
    assert load_config([]) == load_config(["experiment=quickstart"]) == load_config()


def test_load_config_returns_independent_configs():
    first = load_config(["model=tiny"])
    first.data.paths.append("changed")
    first.optim.lr = 99.0
    first.resolved.choices["model"] = "changed"
    second = load_config(["model=tiny"])
    assert second.data.paths == []
    assert second.optim.lr != 99.0
    assert second.resolved.choices["model"] == "tiny"


@pytest.mark.parametrize(
    "path", slow_but(NOT_VARIANTS, FILES), ids=lambda p: f"{p.parent.name}={p.stem}"
)
def test_every_yaml_in_conf_composes_to_valid_config(path):
    group, choice = path.parent.name, path.stem
    cfg = load_config([f"{group}={choice}", *NEEDED.get((group, choice), [])])
    assert cfg.resolved.choices[group] == choice
    assert plain_tree(cfg)


@cache
def of_variant(name: str) -> TrainConfig:
    """Load a config once for all tests; tests must not change the result."""
    return load_config(["model=tiny", f"attention={name}"])


def test_every_attention_yaml_is_named_after_module_of_config_class():
    classes = {}
    for path in sorted((CONF / "attention").glob("*.yaml")):
        kind = type(variant_config(path.stem))
        assert issubclass(kind, AttentionConfig)
        assert kind is not AttentionConfig, f"{path} has no schema line"
        classes[path.stem] = kind
    assert {"standard", "gated", "diff_v1", "diff_v2"} <= set(classes)
    for name, kind in classes.items():
        module = kind.__module__.rpartition(".")[2]
        assert name.startswith(module), f"attention={name} is {kind}"


def test_attention_variant_changes_only_attention_section_of_config():
    base = of_variant("standard")
    for variant in variants():
        other = deepcopy(of_variant(variant))
        other.model.attention = base.model.attention
        other.resolved.choices, other.resolved.schemas = (
            base.resolved.choices,
            base.resolved.schemas,
        )
        assert other == base


@pytest.mark.parametrize("name", slow_but(families(variants()), variants()))
def test_variant_config_matches_attention_section_of_load_config(name):
    alone, composed = variant_config(name), load_config([f"attention={name}"]).model.attention
    assert type(alone) is type(composed)
    assert alone == composed


def test_unset_config_keys_have_expected_default_values(monkeypatch):
    monkeypatch.setenv("DIFFLLM_CACHE", "/some/cache")
    cfg = load_config(["model=tiny", "seq_len=96", "seed=5", "model.vocab_size=1000"])
    assert cfg.model.seq_len == 96
    assert cfg.model.init_seed == 5
    assert cfg.data.vocab_size == 1000
    assert cfg.data.cache_dir == "/some/cache"
    monkeypatch.delenv("DIFFLLM_CACHE")
    assert load_config([]).data.cache_dir == "~/.cache/diffllm"
    cfg = load_config(["model=tiny", "seed=5", "model.init_seed=0"])
    assert (cfg.seed, cfg.model.init_seed) == (5, 0)


# Ranks (test_fuzz_config.py draws invalid numbers)


def test_fsdp_and_hsdp_yaml_set_expected_mesh_sizes():
    assert load_config(["parallel=fsdp"]).parallel.sizes(16) == (1, 16, 1)
    assert load_config(["parallel=hsdp"]).parallel.sizes(16) == (2, 8, 1)


# Errors


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("lr=1e-3", "unknown key lr; did you mean optim.lr?"),
        ("train.log_interval=3", "unknown key train.log_interval; did you mean log_interval?"),
        ("warmup=3", "unknown key warmup; did you mean optim.warmup_steps?"),
        ("attention=diffv2", "does not exist; did you mean diff_v2? choose from"),
    ],
)
def test_error_for_key_without_section_suggests_full_key(word, answer):
    with pytest.raises(ConfigError, match=re.escape(answer)):
        load_config([word])


CORPORA = [
    (["data.paths=mine/a.parquet"], "files", ["mine/a.parquet"], None),
    (["data.paths='my data/*.parquet'"], "files", ["my data/*.parquet"], None),
    (["data.paths=[a.txt,b.txt]"], "files", ["a.txt", "b.txt"], None),
    (["data.dataset=me/corpus"], "hub", [], "me/corpus"),
    (["data.dataset=me/corpus", "data.name=en"], "hub", [], "me/corpus"),
    (["data=files", "data.paths=2024"], "files", ["2024"], None),
]


@pytest.mark.parametrize(("words", "source", "paths", "dataset"), slow_but(CORPORA[::3], CORPORA))
def test_load_config_derives_data_source_from_corpus_keys(words, source, paths, dataset):
    cfg = load_config(words)
    assert cfg.data.source == cfg.resolved.choices["data"] == source
    assert (cfg.data.paths, cfg.data.dataset) == (paths, dataset)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data=stdlib", "data.paths=a.txt"], "data.paths=['a.txt'] cannot be set with"),
        (["data.source=stdlib", "data.paths=a.txt"], "cannot be set with data.source=stdlib"),
        (["data.paths=a.txt", "data.dataset=b"], "data.paths (data=files) and data.dataset"),
        (["data.paths="], "data.source=files needs data.paths=[file, directory, glob, ...]"),
    ],
)
def test_load_config_refuses_corpus_keys_of_a_different_data_source(words, named):
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("key", "kind"),
    [("data.paths", "list"), ("data.document_lengths", "mapping"), ("model.moe", "mapping")],
)
def test_interpolated_number_is_refused_as_value_of_list_or_mapping_key(key, kind):
    with pytest.raises(ConfigError, match=f"{key} refers to the value 7, but must be a {kind}"):
        load_config(["seed=7", f"{key}=${{seed}}"])


def test_error_suggests_only_keys_of_chosen_attention_variant():
    with pytest.raises(ConfigError, match=r"unknown key model\.attention\.pairing") as caught:
        load_config(["attention=diff_v1", "model.attention.pairing=halves"])
    assert "did you mean model.attention.pairing" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"did you mean model\.attention\.lambda_init\?"):
        load_config(["attention=diff_v1", "model.attention.lambda_ini=0.5"])


FAULTS = {
    "steps: 5\n": "the first line of the YAML must be '# @package _global_'",
    "# @package _global_\nsteps: [5\n": "line 3",
    "# @package _global_\n- steps\n": "must contain a mapping of keys to values",
    "# @package _global_\nstep: 16\n": "unknown key step; did you mean steps?",
    "# @package _global_\noptim:\n  lr: fast\n":
        "optim.lr: 'fast' is not a number, such as 0.5 or 1e6",
    "# @package _global_\ndefaults:\n  - override /model: tinny\n":
        "Could not find 'model/tinny' Available options in 'model': base_350m",
}  # fmt: skip


@pytest.mark.parametrize("text", FAULTS)
def test_invalid_experiment_yaml_raises_single_line_error(tmp_path, monkeypatch, text):
    file = tmp_path / "experiment" / "own.yaml"
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr("diffllm.config.plugins._DIRECTORIES", [])
    with pytest.raises(ConfigError) as caught:
        load_config(["experiment=own"], config_dir=tmp_path)
    assert FAULTS[text] in str(caught.value)
    assert "\n" not in str(caught.value)
