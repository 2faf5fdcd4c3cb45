"""The declared effects of all keys, compared with the former tables of key names.

The tables are those of the last version that listed key names in 18 files. Each difference has a
decision.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple, get_type_hints

import pytest

import diffllm.data.text.synthetic  # noqa: F401  registers data=synthetic
from diffllm.checkpoint.hf.layout import VARIANTS, kernel_settings
from diffllm.compare.arms.comparability import Terms, role
from diffllm.compare.study.study_hash import is_hashed
from diffllm.config import TrainConfig, load_config
from diffllm.config.changes import (
    changes_training,
    is_fixed,
    is_fixed_in_stage,
    is_of_model,
    is_within,
    logs_values,
)
from diffllm.config.compose import LENGTHS, deciding_words
from diffllm.config.help import help_text
from diffllm.config.overrides import AUTO
from diffllm.config.words import parsed_override
from diffllm.core.keys import Declaration, class_declarations, key
from diffllm.core.registry import SCHEMAS
from diffllm.core.run_facts import RunFacts, fact_declarations
from diffllm.data.config import BUILT_IN, SourceConfig, read_by
from diffllm.data.curriculum import Point
from diffllm.model.attention.base import AttentionConfig
from diffllm.model.rope import RopeConfig

COMPUTED = "resolved."
OWN = {name: cls for name, cls in SCHEMAS.items() if cls.__module__.startswith("diffllm.")}
"""Registered classes without those of plugins, which other tests register."""
ALL = class_declarations(TrainConfig)
for (group, _), config_class in OWN.items():
    ALL = ALL | class_declarations(
        config_class, "model.attention." if group == "attention" else f"{group}."
    )
SOURCE = class_declarations(SourceConfig, "data.sources.web.")
KEYS = {
    # Former versions stored computed values in the section `run`.
    name.replace(COMPUTED, "run."): declared
    for name, declared in {**ALL, **SOURCE}.items()
}

# Former tables

OF_NO_EFFECT = (
    "run.name", "run.dir", "run.report", "run.sweep", "run.swept", "run.matched",
    "run.allow_changes", "wandb", "resume", "force", "metrics", "profile", "prepare",
    "log_interval", "checkpoint", "eval", "diagnostics", "distributed", "parallel",
    "train.max_consecutive_skips",
    "micro_batch_size", "compile", "activation_checkpointing", "model.attention.backend",
    "model.loss_chunk", "model.attention.values",
    "data.cache_dir", "data.num_workers", "data.prefetch_factor", "data.sample_prompt",
    "data.visible_keys", "data.document_lengths", "plugins",
    *(f"run.choices.{group}" for group in ("model", "data", "optim", "parallel", "experiment")),
)  # fmt: skip
FREE = (
    *OF_NO_EFFECT, "max_tokens", "epochs", "train.budget.flops", "data.paths", "data.tokenizer",
    "data.eos_token",
)  # fmt: skip
NO_WAY_ON = tuple(
    name
    for name in OF_NO_EFFECT
    if name not in ("run.allow_changes", "train.max_consecutive_skips")
)
OF_A_RUN = (
    "model.seq_len", "model.init_seed", "model.init_match", "model.match_params_to",
    "model.match_flops_to", "model.loss_chunk", "model.attention.backend", "model.attention.values",
)  # fmt: skip
A_STAGE_CHANGES = re.compile(
    r"model\.(seq_len|rope\..*|moe\.(bias_update_rate|balance_.*|router_z_loss))"
)
OF_THE_MACHINE = re.compile(
    r"data\.(cache_dir|tokenizer|num_workers|prefetch_factor|(sources\.[^.]+\.)?paths)"
)
LOGGING = ("log_interval", "eval", "diagnostics")
FREE_TEXT = ("data.sample_prompt", "model.match_params_to", "model.match_flops_to")
PATHS = re.compile(
    r"run\.dir|resume|data\.(sources\.[^.]+\.)?(paths|dataset)|data\.(cache_dir|tokenizer)"
)
OF_MACHINE = ("backend", "values")
SET_BY_SWEEP = ("run.name", "run.dir", "run.swept")
FOLLOWS = {
    "model.seq_len": "seq_len",
    "data.vocab_size": "model.vocab_size",
    "model.init_seed": "seed",
}
"""The table of reports, and COPIED_FROM of resume."""
READ = {
    "stdlib": (),
    "packages": (),
    "synthetic": (),
    "files": ("paths", "text_column", "prompt_column", "sample_by"),
    "hub": (
        "dataset", "name", "data_dir", "split", "revision", "text_column", "prompt_column",
    ),
    "tokens": ("paths",),
    "mixture": ("sources",),
}  # fmt: skip
IMPLIED_SOURCE = {
    "paths": "files", "dataset": "hub", "name": "hub", "data_dir": "hub", "revision": "hub",
    "sources": "mixture",
}  # fmt: skip
"""READ_BY of data."""
ROPE_USED_BY = {
    "factor": ("linear", "llama3", "yarn"),
    "original_seq_len": ("llama3", "yarn"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "beta_slow": ("yarn",),
    "beta_fast": ("yarn",),
    "yarn_ramp": ("yarn",),
    "attention_factor": ("yarn",),
}

SEEDS = ("seed", "model.init_seed")
CORPUS = (
    "data.source", "data.dataset", "data.name", "data.split", "data.revision", "data.paths",
    "data.text_column", "data.sample_by",
)  # fmt: skip
TOKENIZER = ("data.tokenizer", "data.eos_token", "data.vocab_size", "data.tokenizer_sample_bytes")
FACTS = {
    "corpus": CORPUS, "tokenizer": TOKENIZER, "compute_dtype": ("precision",),
    "heldout_tokens": ("eval.tokens",),
}  # fmt: skip
IGNORED = {*FREE, "run", "eval.interval", *SEEDS} - {
    "eval", "resume", *CORPUS, *TOKENIZER, "precision",
}  # fmt: skip
INCOMPARABLE = (
    "data", "eval", "resume", "steps", "seq_len", "global_batch_size", "precision", "model",
    "optim.schedule", "optim.warmup_steps", "optim.decay_fraction", "optim.min_lr_ratio",
    "plugins",
)  # fmt: skip
SWEEPABLE = (
    "model.ffn_dim", "model.match_params_to", "model.match_flops_to", "model.init_std",
    "model.z_loss", "model.attention", "model.moe.expert_dim", "model.moe.bias_update_rate",
    "model.moe.balance_loss", "model.moe.balance_over", "model.moe.router_z_loss",
)  # fmt: skip
SPEED = (
    "device", "ranks", "torch", "micro_batch_size", "compile", "compiled",
    "activation_checkpointing",
    "model.attention.backend", "model.attention.values", "model.loss_chunk", "data.num_workers",
    "parallel.replicate", "parallel.shard", "parallel.expert", "parallel.context",
    "parallel.reduce",
)  # fmt: skip
CONDITIONS = (
    "global_batch_size", "seq_len", "optim.schedule", "optim.decay_fraction",
    "optim.min_lr_ratio", "optim.warmup_steps", "optim.weight_decay", "optim.beta1", "optim.beta2",
    "optim.eps", "optim.clip_norm", "data", "eval.tokens", "eval.sequences", "eval.levels",
    "eval.suites_limit", "precision",
)  # fmt: skip
"""Config keys in CONDITIONS of studies."""
RECORDED = (
    "parameters", "flops_per_token", "corpus", "tokenizer", "heldout_tokens", "compute_dtype",
    "torch",
)  # fmt: skip
UNREAD = tuple(name for name in OF_NO_EFFECT if name.startswith("data."))
UNHASHED = (*(name for name in FREE if name != "eval"), "run.study")

# Decisions

ATTENTION_NAME = "The name of an attention YAML may change if all values are equal."
COMPUTED_VALUE = "Computed values follow from other keys, which are compared."
OWN_PATHS = "Sources of a mixture are compared by their content, like data.paths."
GUARD = (
    "The key decides when a run ends as diverged: reports show a difference, studies compare it, "
    "and it may still change at resume."
)


class Table(NamedTuple):
    """A former table of config keys and the predicate that replaces the table."""

    name: str
    former: tuple[str, ...] | set[str] | re.Pattern[str]
    derived: Callable[[str, Declaration], bool]
    decisions: Mapping[str, tuple[str, ...]] = {}
    """Sections and keys that differ, by decision."""
    keys: str = ""
    """Prefix of the keys that the table was about."""


RESUME = {ATTENTION_NAME: ("run.choices",), COMPUTED_VALUE: ("run.defaults",)}
TABLES = [
    Table(
        "OF_NO_EFFECT",
        OF_NO_EFFECT,
        lambda _, declared: not declared.computes,
        {**RESUME, GUARD: ("train.max_consecutive_skips",),
         "Names of runs have no effect; resume still compares them.": ("run.study",)},
    ),
    Table("FREE", FREE, lambda _, declared: not is_fixed(declared),
          {**RESUME, OWN_PATHS: ("data.sources.web.paths",)}),
    Table(
        "NO_WAY_ON",
        NO_WAY_ON,
        lambda _, declared: not changes_training(declared),
        {**RESUME, "`ending` compares run.allow_changes itself.": ("run.allow_changes",),
         "Another study name does not change the training.": ("run.study",)},
    ),
    Table("OF_A_RUN", OF_A_RUN, lambda _, declared: not is_of_model(declared), keys="model."),
    Table(
        "A_STAGE_CHANGES",
        A_STAGE_CHANGES,
        lambda _, declared: is_of_model(declared) and not is_fixed_in_stage(declared),
        {"The length belongs to the run, so a stage does not compare it.": ("model.seq_len",)},
        keys="model.",
    ),
    Table(
        "OF_THE_MACHINE",
        OF_THE_MACHINE,
        lambda _, declared: "machine" in declared.kinds,
        {"The text contains overrides, such as paths of one machine.": ("run.defaults",)},
    ),
    Table(
        "LOGGING",
        LOGGING,
        lambda _, declared: not is_fixed(declared) and logs_values(declared),
    ),
    Table("FREE_TEXT", FREE_TEXT, lambda _, declared: "text" in declared.kinds),
    Table("PATHS", PATHS, lambda _, declared: "path" in declared.kinds),
    Table("names set by a sweep", SET_BY_SWEEP, lambda _, declared: "sweep" in declared.kinds),
    Table("SEEDS", SEEDS, lambda _, declared: "seed" in declared.kinds),
    Table(
        "SPEED",
        SPEED,
        lambda _, declared: declared.effect == "speed",
        {
            "A loader prepares batches, which changes only the speed.": ("data.prefetch_factor",),
            "Saves, traces, comparisons of replicas and event files take time.": (
                "checkpoint.interval", "profile.steps", "distributed.check_interval",
                "metrics.tensorboard",
            ),
        },
    ),
    Table("UNREAD", UNREAD, lambda _, declared: declared.harmless, keys="data."),
    Table(
        "UNHASHED",
        UNHASHED,
        lambda _, declared: not is_hashed(declared),
        {
            **RESUME,
            "Hashes contain all keys of eval and of sources by name, as in older versions.": (
                "data.sources.web.paths", "eval.interval",
            ),
        },
    ),
]  # fmt: skip


def members(table: Table) -> set[str]:
    if isinstance(table.former, re.Pattern):
        return {name for name in KEYS if table.former.fullmatch(name)}
    return {name for name in KEYS if is_within(name, table.former)}


def named(decisions: Mapping[str, tuple[str, ...]]) -> set[str]:
    sections = [name for names in decisions.values() for name in names]
    return {name for name in KEYS if is_within(name, sections)}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_derived_keys_differ_from_former_table_only_by_decisions(table):
    former = members(table)
    derived = {name for name, declared in KEYS.items() if table.derived(name, declared)}
    assert former
    differing = {name for name in former ^ derived if name.startswith(table.keys)}
    assert differing == named(table.decisions)


# Keys with another property


def test_keys_with_reference_as_default_equal_the_former_tables():
    follows = {name: declared.follows for name, declared in KEYS.items() if declared.follows}
    assert follows == FOLLOWS


def test_facts_replace_the_keys_of_former_table_and_decisions():
    """Steps and plugins were compared by special cases, and sources of a mixture by no rule."""
    by_fact: dict[str, set[str]] = {}
    for name, declared in KEYS.items():
        if declared.fact and not name.startswith("data.sources."):
            by_fact.setdefault(declared.fact, set()).add(name)
    decided = {
        "steps": {"max_tokens", "epochs", "train.budget.flops"},
        "plugin_code": {"plugins"},
        # data.data_dir decides the text, like data.name; it was compared separately.
        "corpus": {*CORPUS, "data.data_dir"},
    }
    assert by_fact == {fact: set(names) for fact, names in FACTS.items()} | decided
    sources = {name for name, declared in SOURCE.items() if declared.fact == "corpus"}
    assert sources == {name.replace("data.", "data.sources.web.") for name in decided["corpus"]}


def test_sources_read_the_keys_of_the_former_table():
    assert set(BUILT_IN) == READ.keys()
    for source, names in READ.items():
        assert {name for name, readers in read_by().items() if source in readers} == set(names)
    implied = {
        name.removeprefix("data."): declared.implies
        for name, declared in KEYS.items()
        if declared.implies and not name.startswith("data.sources.")
    }
    assert implied == IMPLIED_SOURCE


def test_rope_scalings_read_the_keys_of_the_former_table():
    declared = class_declarations(RopeConfig).items()
    read = {name: declaration.read_by for name, declaration in declared if declaration.read_by}
    assert read == ROPE_USED_BY


def test_small_tables_are_equal_to_the_former_tables():
    assert LENGTHS == ("steps", "train.budget.flops", "max_tokens", "epochs")
    assert AUTO == {"eval.tokens": "${auto_tokens:}"}
    kernels = {variant: kernel_settings(config) for variant, config in VARIANTS.items()}
    assert set().union(*kernels.values()) == set(OF_MACHINE)
    assert kernels["gated"] == {"backend"}


# Reports and studies


def former_role(name: str) -> str:
    """Return the role of a key in reports of the former version."""
    if is_within(name, IGNORED):
        return "harmless"
    if name.startswith("model.attention."):
        return "question"
    if is_within(name, INCOMPARABLE) and not is_within(name, SWEEPABLE):
        return "condition"
    return "declared"


def compared_by_content(name: str) -> bool:
    """Return whether another key or a fact is compared in place of the key."""
    return KEYS[name].fact is not None or "seed" in KEYS[name].kinds


IN_REPORT, IN_STUDY = Terms("report"), Terms("study")
COMPARED = [name for name in KEYS if f"{COMPUTED}{name[4:]}" not in ALL and name in ALL]
REPORT = {
    GUARD: ("harmless", "declared", ("train.max_consecutive_skips",)),
    "Skipped updates change the parameters; forged studies differed in this key.": (
        "declared", "condition", ("train.skip_step",),
    ),
    "The starting point is compared separately; the path of a checkpoint is only a name.": (
        "condition", "harmless", ("resume",),
    ),
}  # fmt: skip


def test_roles_of_keys_in_reports_differ_from_former_tables_only_by_decisions():
    differing = {}
    for name in COMPARED:
        roles = former_role(name), role(name, KEYS[name], IN_REPORT)
        if roles[0] != roles[1] and not compared_by_content(name):
            differing[name] = roles
    decided = {}
    for before, now, names in REPORT.values():
        decided |= dict.fromkeys(names, (before, now))
    assert differing == decided


STUDY = {
    "Architecture, RoPE and embeddings change the numbers; forged studies differed in them.": (
        "model.dim", "model.n_layers", "model.n_heads", "model.n_kv_heads", "model.head_dim",
        "model.vocab_size", "model.seq_len", "model.rope", "model.qk_norm", "model.tie_embeddings",
        "model.norm_eps", "model.moe.n_experts", "model.moe.top_k", "model.moe.n_shared",
        "model.moe.n_dense_layers", "model.moe.score", "model.moe.renormalise",
        "model.moe.routed_scaling",
    ),
    "Initial values and terms of the loss change the numbers.": (
        "model.init_std", "model.embed_init_std", "model.init_match", "model.z_loss",
        "model.moe.bias_update_rate", "model.moe.balance_loss", "model.moe.balance_over",
        "model.moe.router_z_loss",
    ),
    "The learning rate is a condition, unless the study chooses it.": ("optim.lr",),
    "`steps` was compared as part of the number of tokens.": ("steps",),
    "Arms must evaluate the same tasks at the same steps.": (
        "eval.interval", "eval.suites", "eval.suites_interval",
    ),
    "Arms must log at the same steps, because spikes and diagnostics are compared.": (
        "log_interval", "diagnostics",
    ),
    "Skipped updates change the parameters.": (
        "train.skip_step", "train.max_consecutive_skips",
    ),
}  # fmt: skip


def test_conditions_of_studies_differ_from_former_tables_only_by_decisions():
    differing = set()
    for name in COMPARED:
        before = is_within(name, CONDITIONS) and not is_within(name, UNREAD)
        now = role(name, KEYS[name], IN_STUDY) == "condition"
        if before != now and not compared_by_content(name):
            differing.add(name)
    assert differing == named(STUDY) & set(COMPARED)


def test_facts_have_the_roles_of_former_tables_except_for_the_code():
    declared = fact_declarations()
    speed = {name for name, fact in declared.items() if fact.effect == "speed"}
    # The version of torch is a condition of studies, so times are compared within one version.
    assert speed == {name for name in SPEED if name in declared} - {"torch"}
    roles = {name: role(name, fact, IN_STUDY) for name, fact in declared.items()}
    conditions = {name for name, fact_role in roles.items() if fact_role == "condition"}
    # Studies with different code in two arms passed the former rule.
    assert conditions == {*RECORDED, "code"}
    for name in speed:
        assert role(name, declared[name], Terms("study", measures_time=True)) == "condition"


def test_logging_is_a_condition_only_of_logged_metrics():
    logging = [name for name, declared in KEYS.items() if declared.effect == "logging"]
    assert {"eval.interval", "log_interval", "diagnostics.interval"} <= {*logging}
    for name in logging:
        assert role(name, KEYS[name], IN_STUDY) == "condition"
        assert role(name, KEYS[name], Terms("study", reads_curve=False)) == "harmless"


def test_reason_for_defaults_stays_short_for_long_overrides():
    paths = ",".join(f"{n}" * 60 for n in range(90))
    cfg = load_config(["data=files", f"data.paths=[{paths}]"])
    assert "override of data" in cfg.resolved.defaults


# New keys


def undeclared_fields(config_class: type) -> list[str]:
    """Return the fields without effect or help, in a config class and in nested classes."""
    names = []
    hints = get_type_hints(config_class)
    for config_field in fields(config_class):
        if is_dataclass(hints[config_field.name]):
            names += undeclared_fields(hints[config_field.name])  # type: ignore[arg-type]
            continue
        declared = config_field.metadata.get("declaration")
        if declared is None or not (declared.effect and declared.help):
            names.append(f"{config_class.__name__}.{config_field.name}")
    return names


@dataclass
class Careless(AttentionConfig):
    forgotten: int = 3
    silent: int = key(3, effect="numbers", help="")


def test_every_config_key_and_fact_declares_effect_and_help():
    assert len(OWN) > 4
    for config_class in (TrainConfig, SourceConfig, Point, RunFacts, *OWN.values()):
        assert undeclared_fields(config_class) == []
    assert undeclared_fields(Careless) == ["Careless.forgotten", "Careless.silent"]


@dataclass
class PluginConfig(AttentionConfig):
    kernel: int = key(1, effect="speed", help="Size of a block.")
    window: int = key(4, effect="numbers", help="Number of visible keys.")
    scale: float = 2.0


@pytest.mark.parametrize(
    ("word", "experiment"),
    [
        ("model.attention.kernel=2", "quickstart"),
        ("model.attention.window=2", "none"),
        ("model.attention.scale=1", "none"),
    ],
)
def test_keys_of_plugin_choose_the_defaults_by_their_effect(monkeypatch, word, experiment):
    monkeypatch.setitem(SCHEMAS, ("attention", "plugin"), PluginConfig)
    expected = [] if experiment == "quickstart" else [word]
    assert deciding_words([parsed_override(word), parsed_override("seed=1")]) == expected


@pytest.mark.parametrize(
    ("words", "defaults"),
    [
        ([], "experiment=quickstart, because"),
        (["seed=1", "log_interval=5"], "experiment=quickstart, because"),
        (["seed=1", "optim.lr=1e-3", "steps=9"], "conf/train.yaml, because the override of"),
        (["experiment=none", "steps=150"], "None"),
    ],
)
def test_config_contains_set_of_defaults_and_reason(words, defaults):
    assert str(load_config(words).resolved.defaults).startswith(defaults)


def test_equal_configs_of_different_commands_are_equal():
    first = load_config(["seed=1"])
    second = load_config(["experiment=quickstart", "seed=1"])
    assert first.resolved.defaults != second.resolved.defaults
    assert first == second


def test_help_with_seed_shows_defaults_of_quickstart():
    assert "seq_len=256" in help_text(["seed=1"])
    assert "seq_len=512" in help_text(["seed=1", "optim.lr=1e-3"])
