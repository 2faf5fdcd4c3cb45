"""Roles of config keys and facts in reports, and the page's list of differences between rows."""

import json
from dataclasses import replace

import pytest
from runs.written import loaded, sweep, write_run

from diffllm.cli.report import report_command
from diffllm.compare.conditions import role
from diffllm.compare.report.comparison import compare
from diffllm.compare.report.differences import OMITTED
from diffllm.compare.report.keys import FACTS, SEEDS, causes_of, is_deciding, keys_of_fact
from diffllm.config import TrainConfig
from diffllm.config.changes import is_within
from diffllm.core.keys import Declaration, class_declarations
from diffllm.metrics.facts import machine_facts
from diffllm.model.attention.diff_v1 import DiffV1Config

DECLARED = class_declarations(TrainConfig) | class_declarations(DiffV1Config, "model.attention.")
CODE = [{"diffllm": {"hash": letter * 64}} for letter in "ab"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    variants = ("standard", "diff_v1")
    return loaded([write_run(root / name, f"attention={name}") for name in variants])


def with_value(run, key, value="other", declared=None):
    """Return a copy of `run` with a config value that the config was not checked for."""
    changed = replace(run)
    changed.config = {**run.config, key: value}
    if declared:
        changed.declarations = {**run.declarations, key: declared}
    return changed


def roles(comparison):
    return {difference.key: difference.role for difference in comparison.row_differences}


@pytest.mark.parametrize("key", DECLARED)
def test_difference_in_key_has_role_of_its_declaration(pair, key):
    standard, other = pair
    comparison = compare([standard, with_value(other, key)])
    declared = DECLARED[key]
    expected = role(key, declared, "report")
    compared_by = declared.fact in (*FACTS, *DECLARED)
    if is_within(key, OMITTED):
        assert key not in roles(comparison)
        assert comparison.differences == []
    elif compared_by:
        assert roles(comparison)[key] == "harmless"
        assert comparison.differences == []
    elif key == "model.attention.values":  # Only one of the variants has the key.
        assert comparison.row_differences == []
    else:
        assert roles(comparison)[key] == expected
        assert comparison.differences == ([key] if expected == "condition" else [])
    labels = " ".join(row.label for row in comparison.rows)
    shows_key = f"{key.rpartition('.')[2]}=" in labels
    assert shows_key is (is_deciding(key, declared) and not compared_by)


FORMER = {
    "harmless": (
        "log_interval", "checkpoint", "diagnostics", "distributed", "parallel", "wandb", "metrics",
        "profile", "prepare", "plugins", "force", "run", "eval.interval", "max_tokens", "epochs",
        "train.max_consecutive_skips", "micro_batch_size", "compile", "activation_checkpointing",
        "model.attention.backend", "model.attention.values", "model.loss_chunk", "data.cache_dir",
        "data.num_workers", "data.prefetch_factor", "data.sample_prompt", "data.visible_keys",
        "data.document_lengths", "seed", "model.init_seed",
    ),
    "swept": (
        "model.ffn_dim", "model.match_params_to", "model.match_flops_to", "model.init_std",
        "model.z_loss", "model.attention", "model.moe.expert_dim", "model.moe.bias_update_rate",
        "model.moe.balance_loss", "model.moe.balance_over", "model.moe.router_z_loss",
    ),
    "condition": (
        "data", "eval", "resume", "steps", "seq_len", "global_batch_size", "precision", "model",
        "optim.schedule", "optim.warmup_steps", "optim.decay_fraction", "optim.min_lr_ratio",
    ),
}  # fmt: skip
"""Keys and sections by the tables that reports had before keys declared their effects."""
FORMER_FACTS = {
    "corpus": {
        "data.source", "data.dataset", "data.name", "data.split", "data.revision", "data.paths",
        "data.text_column", "data.sample_by",
    },
    "tokenizer": {
        "data.tokenizer", "data.eos_token", "data.vocab_size", "data.tokenizer_sample_bytes",
    },
    "compute_dtype": {"precision"},
    "heldout_tokens": {"eval.tokens"},
}  # fmt: skip
FORMER_SPEED = {
    "device", "ranks", "torch", "micro_batch_size", "compile", "compiled",
    "activation_checkpointing", "model.attention.backend", "model.attention.values",
    "model.loss_chunk", "data.num_workers", "parallel.replicate", "parallel.shard",
    "parallel.expert", "parallel.context", "parallel.reduce",
}  # fmt: skip


def former_group(key):
    """Return the first of the former tables that names the key; other keys were swept."""
    return next((name for name, keys in FORMER.items() if is_within(key, keys)), "swept")


def test_derived_sets_equal_former_tables_except_decided_differences():
    changed = {}
    for key, declared in DECLARED.items():
        group = "harmless"
        if is_deciding(key, declared) and declared.fact not in DECLARED:
            is_condition = role(key, declared, "report") == "condition"
            group = "condition" if is_condition else "swept"
        if group != former_group(key) and not is_within(key, ["resolved"]):
            changed[key] = (former_group(key), group)
    assert changed == {
        # Skipped updates change the parameters, but no table named the key.
        "train.skip_step": ("swept", "condition"),
        # The path is a place; a separate value states the starting point.
        "resume": ("condition", "harmless"),
    }
    facts = {fact: keys_of_fact(fact, DECLARED) for fact in FACTS}
    # A folder of a dataset chooses files, like all other keys of the corpus.
    assert facts == FORMER_FACTS | {"corpus": FORMER_FACTS["corpus"] | {"data.data_dir"}}
    from_corpus = facts["corpus"] | facts["tokenizer"] | {"model.vocab_size", "corpus"}
    assert causes_of("tokenizer", DECLARED) == from_corpus
    heldout = {"eval.tokens", "data.heldout_fraction", "tokenizer"}
    assert causes_of("heldout_tokens", DECLARED) == from_corpus | heldout
    speed = {key for key, declared in DECLARED.items() if declared.effect == "speed"}
    # The former table missed this number of prepared batches.
    assert speed | {*machine_facts()} == FORMER_SPEED | {"data.prefetch_factor"}
    assert {*machine_facts()} == {"device", "ranks", "torch", "compiled"}
    assert {*SEEDS} == {"seed", "model.init_seed"}


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (None, "condition"),
        (Declaration(effect="order"), "condition"),
        (Declaration(effect="numbers", may_differ=frozenset(["report"])), "declared"),
        (Declaration(effect="speed", resumable=True), "harmless"),
    ],
)
def test_plugin_key_takes_part_in_report_with_its_effect(pair, declared, expected):
    standard, other = pair
    comparison = compare([standard, with_value(other, "data.noise", 1, declared)])
    assert comparison.differences == (["data.noise"] if expected == "condition" else [])
    if declared:
        assert roles(comparison)["data.noise"] == expected


def test_starting_weights_of_one_row_are_a_condition(pair):
    standard, other = pair
    other = replace(other, cfg=replace(other.cfg, resume="weights:/other/run"))
    comparison = compare([standard, other])
    assert comparison.differences == ["resume"]
    assert roles(comparison) == {"resume": "condition"}


def mixture(path):
    return f"data.sources={{web: {{source: files, paths: [{path}]}}}}"


@pytest.mark.parametrize(("corpus", "apart"), [("c0" * 32, []), (None, ["data.sources.web.paths"])])
def test_paths_of_mixture_sources_are_compared_by_corpus_hash(tmp_path, corpus, apart):
    paths = []
    for variant in ("standard", "gated"):
        words = (f"attention={variant}", "data=mixture", mixture(f"{variant}.txt"))
        paths.append(write_run(tmp_path / variant, *words, facts={"corpus": corpus}))
    assert compare(loaded(paths)).differences == apart


@pytest.mark.parametrize(("versions", "noted"), [((0, 1, 0, 1), False), ((0, 0, 0, 1), True)])
def test_note_names_rows_of_different_code_versions(tmp_path, versions, noted):
    paths = []
    for i, version in enumerate(versions):
        words = (f"attention={('standard', 'gated')[i // 2]}", f"seed={i % 2}")
        paths.append(write_run(tmp_path / f"{i}", *words, facts=CODE[version]))
    comparison = compare(loaded(paths))
    note = (
        "Rows were trained by different versions of diffllm's code: aaaaaaaa (standard, gated), "
        "bbbbbbbb (gated)."
    )
    assert (note in comparison.notes) is noted
    assert ("code" in roles(comparison)) is noted
    assert comparison.differences == []


@pytest.mark.parametrize("pinned", [(), ("gated",), ("standard", "gated")])
def test_pinned_initial_seed_of_one_row_is_a_condition(tmp_path, pinned):
    paths = sweep(tmp_path, {"standard": [4.0, 4.1], "gated": [3.9, 4.0]})
    runs = []
    for run in loaded(paths):
        if run.variant in pinned:
            run = replace(run, cfg=replace(run.cfg, model=replace(run.cfg.model, init_seed=1)))
        runs.append(run)
    comparison = compare(runs)
    assert ("model.init_seed" in roles(comparison)) is (len(pinned) == 1)
    gap_seeds = 1 if len(pinned) == 1 else 2
    assert comparison.rows[1].gap.seeds == gap_seeds


@pytest.mark.slow  # draws the figures of a page
def test_page_and_json_list_all_differences_between_rows(tmp_path, capsys):
    first = write_run(tmp_path / "a", "attention=standard", "optim.lr=0.5")
    words = ("attention=gated", "optim.lr=0.5", "log_interval=5", "train.skip_step=off")
    write_run(tmp_path / "b", *words, facts={"torch": "3.0"})
    assert roles(compare(loaded([first, tmp_path / "b"]))) == {
        "train.skip_step": "condition",
        "torch": "declared",
        "log_interval": "harmless",
    }
    report_command([str(tmp_path), "--json"])
    differences = json.loads(capsys.readouterr().out)["differences"]
    assert differences[2] == {
        "key": "log_interval",
        "role": "harmless",
        "values": {"10": ["standard skip_step=nonfinite"], "5": ["gated skip_step=off"]},
        "reason": "decides only which values are logged, and how often",
    }
    html = (tmp_path / "report.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert "Differences between these rows (3)" in html
    assert "attention=gated train.skip_step=off torch=3.0 log_interval=5" in html
