"""The typed configuration: what composes, what is derived, what cannot run."""

import re
from copy import deepcopy
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType

import pytest
from omegaconf import OmegaConf
from tiers import families, slow_but

import diffllm
from diffllm import load_config
from diffllm.config import Precision, TrainConfig
from diffllm.config.compose import variant_config, variants
from diffllm.config.plugins import config_directory
from diffllm.core.errors import ConfigError
from diffllm.distributed.mesh import ParallelConfig
from diffllm.metrics.wandb_run import WandbMode
from diffllm.model.attention.base import AttentionConfig
from diffllm.optim import Schedule

CONF = config_directory()
FILES = sorted(path for path in CONF.glob("*/*.yaml") if path.parent.name != "study")
NOT_VARIANTS = [path for path in FILES if path.parent.name != "attention"]
NEEDED = {  # what a choice cannot do without
    ("data", "files"): ["data.paths=[corpus.txt]"],
    ("data", "hub"): ["data.dataset=owner/name"],
    ("data", "mixture"): ["data.sources={a: {}}"],
    ("data", "tokens"): ["data.paths=[a.bin]", "data.tokenizer=t.model"],
}


def plain_tree(node: object) -> bool:
    """Dataclasses of plain values all the way down, nothing of the config library."""
    if is_dataclass(node):
        return all(plain_tree(getattr(node, f.name)) for f in fields(node))
    if isinstance(node, list):
        return type(node) is list and all(plain_tree(item) for item in node)
    if isinstance(node, dict):
        return type(node) is dict and all(plain_tree(item) for item in node.values())
    return isinstance(node, int | float | str | Enum | NoneType)


def test_the_result_is_typed():
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


def test_the_public_entry_points_are_those_of_the_readme():
    cfg = diffllm.load_config(["model=tiny", "attention=diff_v2"])
    model = diffllm.build_model(cfg.model)
    assert sum(p.numel() for p in model.parameters()) > 0


def test_no_overrides_is_the_quickstart():
    assert load_config([]) == load_config(["experiment=quickstart"]) == load_config()


def test_a_config_is_no_ones_but_the_callers():
    first = load_config(["model=tiny"])
    first.data.paths.append("changed")
    first.optim.lr = 99.0
    first.run.choices["model"] = "changed"
    second = load_config(["model=tiny"])
    assert second.data.paths == []
    assert second.optim.lr != 99.0
    assert second.run.choices["model"] == "tiny"


def test_there_is_a_yaml_in_every_group():
    groups = {path.parent.name for path in FILES}
    assert groups == {"model", "attention", "data", "optim", "parallel", "experiment"}


@pytest.mark.parametrize(
    "path", slow_but(NOT_VARIANTS, FILES), ids=lambda p: f"{p.parent.name}={p.stem}"
)
def test_every_yaml_composes(path: Path):
    group, choice = path.parent.name, path.stem
    cfg = load_config([f"{group}={choice}", *NEEDED.get((group, choice), [])])
    assert cfg.run.choices[group] == choice
    assert plain_tree(cfg)


@cache
def of_variant(name: str) -> TrainConfig:
    """Composed once for the tests that look at all; nobody may change it."""
    return load_config(["model=tiny", f"attention={name}"])


def test_every_variant_composes_to_a_class_of_its_own():
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


def test_every_variant_file_has_a_yaml():
    files = (Path(diffllm.__file__).parent / "model" / "attention").glob("*.py")
    variants = {p.stem for p in files if '@schema(group="attention"' in p.read_text()}
    assert {"standard", "gated", "diff_v1", "diff_v2"} <= variants
    assert variants <= {p.stem for p in (CONF / "attention").glob("*")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}={p.stem}")
def test_no_yaml_can_call_code(path: Path):
    assert "_target_" not in path.read_text()


def test_changing_the_variant_changes_nothing_else():
    base = of_variant("standard")
    for variant in variants():
        other = deepcopy(of_variant(variant))
        other.model.attention = base.model.attention
        other.run.choices, other.run.schemas = base.run.choices, base.run.schemas
        assert other == base


@pytest.mark.parametrize("name", slow_but(families(variants()), variants()))
def test_a_variant_alone_is_the_one_of_the_whole_config(name):
    alone, composed = variant_config(name), load_config([f"attention={name}"]).model.attention
    assert type(alone) is type(composed)
    assert alone == composed


def test_derived_values_follow_what_they_derive_from(monkeypatch):
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


def test_the_typed_config_survives_yaml():
    cfg = load_config(["model=tiny", "attention=gated", "run.swept=[seed]"])
    text = OmegaConf.to_yaml(OmegaConf.structured(cfg))
    assert (
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cfg), OmegaConf.create(text)))
        == cfg
    )


# Batches


@pytest.mark.parametrize(
    ("global_batch", "micro", "ranks", "expected"),
    [
        (16, None, 1, (16, 1)),
        (16, None, 16, (1, 1)),
        (16, 2, 4, (2, 2)),
        (48, 3, 4, (3, 4)),
    ],
)
def test_micro_batches(global_batch, micro, ranks, expected):
    cfg = load_config([f"global_batch_size={global_batch}"])
    cfg.micro_batch_size = micro
    sequences, passes = cfg.micro_batches(ranks)
    assert (sequences, passes) == expected
    assert sequences * passes * ranks == global_batch


@pytest.mark.parametrize(
    ("global_batch", "micro", "ranks", "message"),
    [
        (16, None, 3, r"global_batch_size=16 .* 3 ranks"),
        (16, 3, 1, r"micro_batch_size=3 must divide the 16 .*global_batch_size=16"),
        (16, 8, 4, r"micro_batch_size=8 must divide the 4 "),
    ],
)
def test_batches_that_cannot_be_shared_are_refused(global_batch, micro, ranks, message):
    cfg = load_config([f"global_batch_size={global_batch}"])
    cfg.micro_batch_size = micro
    with pytest.raises(ConfigError, match=message):
        cfg.micro_batches(ranks)


# Meshes


@pytest.mark.parametrize(
    ("replicate", "shard", "expert", "ranks", "expected"),
    [
        (1, -1, 1, 1, (1, 1, 1)),
        (2, -1, 1, 8, (2, 4, 1)),
        (-1, 8, 1, 32, (4, 8, 1)),
        (1, -1, 4, 4, (1, 1, 4)),
        (2, -1, 8, 64, (2, 4, 8)),
        (-1, 2, 4, 16, (2, 2, 4)),
    ],
)
def test_mesh_sizes(replicate, shard, expert, ranks, expected):
    cfg = ParallelConfig(replicate, shard, expert)
    cfg.validate(n_experts=8)
    assert cfg.sizes(ranks) == expected


@pytest.mark.parametrize(
    ("replicate", "shard", "expert", "ranks"),
    [
        (1, 4, 1, 8),
        (-1, 8, 1, 4),
        (16, -1, 1, 8),
        (1, -1, 4, 6),
        (-1, 2, 4, 12),
    ],
)
def test_a_mesh_that_does_not_fill_the_world_is_refused(replicate, shard, expert, ranks):
    cfg = ParallelConfig(replicate, shard, expert)
    cfg.validate(n_experts=8)
    message = f"parallel.replicate={replicate} x parallel.shard={shard} .* {ranks} ranks"
    with pytest.raises(ConfigError, match=message) as error:
        cfg.sizes(ranks)
    assert (f"parallel.expert={expert}" in str(error.value)) == (expert > 1)


def test_the_parallel_yamls_are_fsdp_and_one_copy_a_node():
    assert load_config(["parallel=fsdp"]).parallel.sizes(16) == (1, 16, 1)
    assert load_config(["parallel=hsdp"]).parallel.sizes(16) == (2, 8, 1)
    assert load_config(["parallel=hsdp", "parallel.shard=4"]).parallel.sizes(16) == (4, 4, 1)


@pytest.mark.parametrize(
    ("expert", "n_experts", "message"),
    [
        (3, 8, r"parallel\.expert=3 must divide model\.moe\.n_experts=8"),
        (2, 0, r"parallel\.expert=2 needs a mixture-of-experts model"),
        (0, 8, r"parallel\.expert=0 must be at least 1"),
    ],
)
def test_experts_that_ranks_cannot_share_out_are_refused(expert, n_experts, message):
    cfg = load_config(["model=tiny"])
    cfg.parallel.expert, cfg.model.moe.n_experts, cfg.model.moe.expert_dim = expert, n_experts, 8
    with pytest.raises(ConfigError, match=message):
        cfg.validate()


# What cannot run anywhere


WITHOUT_SECTION = [
    ("lr=1e-3", "unknown key lr; did you mean optim.lr?"),
    ("+lr=1e-3", "unknown key lr; did you mean optim.lr?"),
    ("n_layers=3", "unknown key n_layers; did you mean model.n_layers?"),
    ("train.log_interval=3", "unknown key train.log_interval; did you mean log_interval?"),
    ("warmup=3", "unknown key warmup; did you mean optim.warmup_steps?"),
    ("batch_size=3", "unknown key batch_size; did you mean micro_batch_size?"),
]


@pytest.mark.parametrize(
    ("word", "answer"),
    slow_but(WITHOUT_SECTION[::3], WITHOUT_SECTION),
)
def test_a_key_without_its_section_is_answered_with_the_whole_one(word, answer):
    with pytest.raises(ConfigError) as caught:
        load_config([word])
    assert str(caught.value) == answer


CORPORA = [
    (["data.paths=mine/a.parquet"], "files", ["mine/a.parquet"], None),
    (["data.paths='my data/*.parquet'"], "files", ["my data/*.parquet"], None),
    (["data.paths=[a.txt,b.txt]"], "files", ["a.txt", "b.txt"], None),
    (["data.dataset=me/corpus"], "hub", [], "me/corpus"),
    (["data.dataset=me/corpus", "data.name=en"], "hub", [], "me/corpus"),
    (["data=files", "data.paths=2024"], "files", ["2024"], None),
]


@pytest.mark.parametrize(
    ("words", "source", "paths", "dataset"),
    slow_but(CORPORA[::3], CORPORA),
)
def test_keys_of_a_corpus_name_its_source_and_one_path_is_enough(words, source, paths, dataset):
    cfg = load_config(words)
    assert cfg.data.source == cfg.run.choices["data"] == source
    assert (cfg.data.paths, cfg.data.dataset) == (paths, dataset)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data=stdlib", "data.paths=a.txt"], "data.paths=['a.txt'] needs data=files, not stdlib"),
        (["data.source=stdlib", "data.paths=a.txt"], "needs data=files, not stdlib"),
        (["data.paths=a.txt", "data.dataset=b"], "data.paths (data=files) and data.dataset"),
        (["data.paths="], "data.source=files needs data.paths=[file, glob, ...]"),
    ],
)
def test_a_source_that_is_given_is_not_replaced(words, named):
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    assert named in str(caught.value)


def test_a_field_of_another_variant_is_answered_with_those_of_the_chosen_one():
    with pytest.raises(ConfigError, match=r"unknown key model\.attention\.pairing") as caught:
        load_config(["attention=diff_v1", "model.attention.pairing=halves"])
    assert "did you mean model.attention.pairing" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"did you mean model\.attention\.lambda_init\?"):
        load_config(["attention=diff_v1", "model.attention.lambda_ini=0.5"])


FAULTS = {
    "steps: 5\n": "unknown key experiment",
    "# @package _global_\nsteps: [5\n": "line 3",
    "# @package _global_\n- steps\n": "a mapping of keys to values is needed",
    "# @package _global_\ndefaults: [gone]\n": "experiment/gone",
    "# @package _global_\nstep: 16\n": "unknown key step; did you mean steps?",
    "# @package _global_\neval:\n  intervall: 8\n":
        "unknown key eval.intervall; did you mean eval.interval?",
    "defaults:\n  - override /model: tiny\nsteps: 3\n":
        "Could not override 'model@experiment.model'",
    "# @package _global_\noptim:\n  lr: fast\n":
        "optim.lr: 'fast' is not a number, as 0.5 or 1e6 are",
    "# @package _global_\ndefaults:\n  - override /model: tinny\n":
        "Could not find 'model/tinny' Available options in 'model': base_350m",
    "# @package _global_\ndefaults:\n  - /model: tiny\n":
        "Multiple values for model. To override a value use 'override model: tiny'",
}  # fmt: skip


@pytest.mark.parametrize("number", slow_but([0, 3], range(len(FAULTS))))
def test_fault_in_experiment_file_is_named_with_nearest_key(tmp_path, monkeypatch, number):
    text, said = list(FAULTS.items())[number]
    file = tmp_path / "experiment" / "own.yaml"
    file.parent.mkdir()
    file.write_text(text)
    monkeypatch.setattr("diffllm.config.plugins._DIRECTORIES", [])
    with pytest.raises(ConfigError) as caught:
        load_config(["experiment=own"], config_dir=tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("attention=standard,gated", "several values are a sweep, which -m runs"),
        ("attention=diffv2", "does not exist; did you mean diff_v2? choose from"),
        ("max_tokens=50k", "'50k' is not a number"),
        ("step=20", "did you mean steps?"),
    ],
)
def test_slips_of_the_first_hour_are_answered(word, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config([word])


def test_models_of_125m_and_more_measure_a_part_of_a_split_in_the_end():
    """Two percent of a trillion tokens would take days."""
    assert load_config(["model=small_125m"]).eval.tokens == 1e7
    assert load_config(["model=small_125m", "eval.tokens=null"]).eval.tokens is None
    assert load_config(["model=tiny"]).eval.tokens is None
