"""Roles of config keys and facts in reports, and the page's list of differences between rows."""

import json
from copy import deepcopy
from dataclasses import replace
from operator import attrgetter

import pytest
from runs.written import edit_json, loaded, runs_in, sweep, write_run

from diffllm.cli.report import report_command
from diffllm.compare.arms.comparability import REPORT, Comparand, Terms, differences, role
from diffllm.compare.report.comparison import compare
from diffllm.compare.report.keys import FACTS, SEEDS, causes_of, is_deciding, keys_of_fact
from diffllm.compare.study.declared_differences import settings_of
from diffllm.config import TrainConfig
from diffllm.config.changes import is_within
from diffllm.config.saved import flatten, yaml_dict
from diffllm.core.keys import Declaration, class_declarations
from diffllm.core.run_facts import fact_declarations, fact_types, facts_of, machine_facts
from diffllm.model.attention.diff_v1 import DiffV1Config

DECLARED = class_declarations(TrainConfig) | class_declarations(DiffV1Config, "model.attention.")
OMITTED = ("run", "resolved", "seed", "resume", "plugins")
"""Keys and sections that differ between any two runs, or whose computed values are compared."""
SIZES = {"parameters", "flops_per_token"}
"""Facts in which the variants of a report may differ."""


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    variants = ("standard", "diff_v1")
    return loaded([write_run(root / name, f"attention={name}") for name in variants])


def run_with_value(run, key, value="other", declared=None):
    """Return a copy of `run` with a config value that the config was not checked for."""
    changed = replace(run)
    following = [name for name, other in DECLARED.items() if other.follows == key]
    changed.config = {**run.config, **dict.fromkeys([key, *following], value)}
    if declared:
        changed.declarations = {**run.declarations, key: declared}
    return changed


def runs_with_fact(root, fact, values):
    """Write and load runs; `values` are the values of a fact by variant and seed."""
    for variant, by_seed in values.items():
        for seed, value in enumerate(by_seed):
            words = (f"attention={variant}", f"seed={seed}")
            write_run(root / f"{variant}{seed}", *words, facts={fact: value})
    return runs_in(root)


def roles(comparison):
    return {difference.key: difference.role for difference in comparison.row_differences}


@pytest.mark.parametrize("key", DECLARED)
def test_difference_in_key_has_role_of_its_declaration(two_runs, key):
    standard, other = two_runs
    comparison = compare([standard, run_with_value(other, key)])
    declared = DECLARED[key]
    expected = role(key, declared, REPORT)
    compared_by = declared.fact in (*FACTS, *DECLARED)
    if is_within(key, OMITTED):
        assert key not in roles(comparison)
        assert comparison.differences == []
    elif compared_by:
        assert roles(comparison)[key] == "harmless"
        assert comparison.differences == []
    elif key in SEEDS:  # Rows contain several seeds.
        assert roles(comparison) == {key: "condition"}
        assert comparison.differences == []
    elif key == "model.attention.values":  # Only one of the variants has the key.
        assert comparison.row_differences == []
    else:
        assert roles(comparison)[key] == expected
        assert comparison.differences == ([key] if expected == "condition" else [])
    labels = " ".join(row.label for row in comparison.rows)
    shows_key = f"{key.rpartition('.')[2]}=" in labels
    assert shows_key is (
        is_deciding(key, declared) and not (compared_by or is_within(key, OMITTED))
    )


def with_setting(run, key):
    """Return a copy of `run` with another value of a config key and of the keys that follow it."""
    cfg = deepcopy(run.cfg)
    config = flatten(yaml_dict(cfg))
    value = 7 if isinstance(config.get(key), int | float) else "other"
    for name in (key, *(name for name, other in DECLARED.items() if other.follows == key)):
        *sections, field = name.split(".")
        object.__setattr__(attrgetter(".".join(sections))(cfg) if sections else cfg, field, value)
    return replace(run, cfg=cfg)


FACTS_OF_RUN = {"python": {"environment": {"python": "other"}}, "code": {"diffllm": {"hash": "b"}}}


def with_fact(run, fact):
    kinds = fact_types()[fact]
    values = {bool: True, float: 99, str: "other"}
    value = next(values[kind] for kind in kinds if kind in values)
    entry = FACTS_OF_RUN.get(fact, {fact: value})
    return replace(run, facts={**run.facts, **entry})


def conditions_of_study(runs):
    """Return the undeclared differences of two runs in a study of their final losses."""
    comparands = []
    for run in runs:
        values = settings_of(run.cfg, False) | vars(facts_of(run.facts))
        comparands.append(Comparand(run.variant, run.cfg.seed, values))
    compared = differences(comparands, Terms("study", reads_curve=False))
    names = {difference.key for difference in compared if difference.role == "condition"}
    if "tokens" not in names:
        return names
    # A study compares tokens in place of steps.
    return names - {"tokens"} or {"steps"}


SETTABLE = [name for name in DECLARED if not name.startswith("resolved.")]


@pytest.mark.parametrize("name", [*SETTABLE, *fact_declarations()])
def test_report_and_study_compare_the_same_runs_except_for_declared_permissions(two_runs, name):
    standard, other = two_runs
    is_fact = name in fact_declarations()
    declared = fact_declarations()[name] if is_fact else DECLARED[name]
    runs = [standard, with_fact(other, name) if is_fact else with_setting(other, name)]
    comparison = compare(runs)
    report = {key for key, role in roles(comparison).items() if role == "condition"}
    study = conditions_of_study(runs)
    if not declared.may_differ & {"report", "study"}:
        assert report == study
        if name != "seed":  # Runs of different seeds have no paired gap.
            assert (comparison.rows[-1].gap is None) == bool(report)
    for place, conditions in (("report", report), ("study", study)):
        assert conditions <= {name}
        if place in declared.may_differ:
            assert not conditions
        elif declared.may_differ & {"report", "study"}:
            assert conditions == {name}


def test_facts_replace_their_config_keys_and_explain_other_facts():
    facts = {fact: keys_of_fact(fact, DECLARED) for fact in FACTS}
    assert facts["compute_dtype"] == {"precision"}
    assert facts["heldout_tokens"] == {"eval.tokens"}
    assert {"data.paths", "data.data_dir"} <= facts["corpus"]
    from_corpus = facts["corpus"] | facts["tokenizer"] | {"model.vocab_size", "corpus"}
    assert causes_of("tokenizer", DECLARED) == from_corpus
    heldout = {"eval.tokens", "data.heldout_fraction", "tokenizer"}
    assert causes_of("heldout_tokens", DECLARED) == from_corpus | heldout
    assert {*machine_facts()} == {"device", "ranks", "torch", "compiled"}
    assert {*SEEDS} == {"seed", "model.init_seed"}


def test_strictest_declaration_decides_if_plugins_declare_one_key_differently(two_runs):
    speed = Declaration(effect="speed", resumable=True)
    runs = [
        run_with_value(run, "data.tile", value, declared)
        for run, value, declared in zip(two_runs, (1, 2), (Declaration(), speed), strict=True)
    ]
    for ordered in (runs, runs[::-1]):
        assert compare(ordered).differences == ["data.tile"]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (None, "condition"),
        (Declaration(effect="order"), "condition"),
        (Declaration(effect="numbers", may_differ=frozenset(["report"])), "declared"),
        (Declaration(effect="speed", resumable=True), "harmless"),
    ],
)
def test_plugin_key_takes_part_in_report_with_its_effect(two_runs, declared, expected):
    standard, other = two_runs
    comparison = compare([standard, run_with_value(other, "data.noise", 1, declared)])
    assert comparison.differences == (["data.noise"] if expected == "condition" else [])
    if declared:
        assert roles(comparison)["data.noise"] == expected


def test_starting_weights_of_one_row_are_a_condition(two_runs):
    standard, other = two_runs
    other = replace(other, cfg=replace(other.cfg, resume="weights:/other/run"))
    comparison = compare([standard, other])
    assert comparison.differences == ["resume"]
    assert roles(comparison) == {"resume": "condition"}


def mixture_override(path):
    return f"data.sources={{web: {{source: files, paths: [{path}]}}}}"


@pytest.mark.parametrize(("corpus", "apart"), [("c0" * 32, []), (None, ["data.sources.web.paths"])])
def test_paths_of_mixture_sources_are_compared_by_corpus_hash(tmp_path, corpus, apart):
    paths = []
    for variant in ("standard", "gated"):
        words = (f"attention={variant}", "data=mixture", mixture_override(f"{variant}.txt"))
        paths.append(write_run(tmp_path / variant, *words, facts={"corpus": corpus}))
    assert compare(loaded(paths)).differences == apart


@pytest.mark.parametrize(("standard", "noted"), [("ab", False), ("aa", True)])
def test_note_names_rows_of_different_code_versions(tmp_path, standard, noted):
    code = {"a": {"hash": "a" * 64}, "b": {"hash": "b" * 64}}
    versions = {"standard": [code[name] for name in standard], "gated": [code["a"], code["b"]]}
    comparison = compare(runs_with_fact(tmp_path, "diffllm", versions))
    note = (
        "Rows were trained by different versions of diffllm's code: aaaaaaaa (standard, gated), "
        "bbbbbbbb (gated)."
    )
    assert (note in comparison.notes) is noted
    assert ("code" in roles(comparison)) is noted
    assert comparison.differences == []


@pytest.mark.parametrize(("standard", "comparable"), [("ab", True), ("aa", False)])
def test_torch_may_differ_between_seeds_but_not_between_arms(tmp_path, standard, comparable):
    runs = runs_with_fact(tmp_path, "torch", {"gated": "ab", "standard": standard})
    comparison = compare(runs)
    expected = set() if comparable else {"torch"}
    assert {*comparison.differences} == conditions_of_study(runs) - SIZES == expected
    assert len(comparison.rows) == (2 if comparable else 3)


@pytest.mark.parametrize("words", [("attention=standard", "steps=10"), ("attention=diff_v2",)])
def test_torch_of_another_run_does_not_change_a_gap(tmp_path, words):
    """The other run has other steps or another variant."""
    sweep(tmp_path, {"standard": [4.0, 4.1, 4.3], "gated": [3.9, 3.95, 4.2]}, torch="2.13")
    for variant in ("standard", "gated"):
        edit_json(tmp_path / f"{variant}-seed2" / "run.json", torch="2.14")
    _, gated = compare(runs_in(tmp_path)).rows
    write_run(tmp_path / "z", *words, facts={"torch": "2.12"})
    comparison = compare(runs_in(tmp_path))
    assert [len(group.rows) for group in comparison.groups] == [2, 1]
    assert comparison.rows[1].gap == gated.gap
    assert gated.gap.seeds == 3
    assert comparison.rows[1].keys["torch"] == "2.13 or 2.14"


def test_arms_with_equal_versions_of_torch_in_other_seeds_are_not_compared(tmp_path):
    versions = {"standard": "ab", "gated": "ab", "diff_v1": "ba"}
    comparison = compare(runs_with_fact(tmp_path, "torch", versions))
    gap_rows = [row for row in comparison.rows if row.gap]
    assert [(row.label, row.gap.seeds) for row in gap_rows] == [("gated torch=a or b", 2)]


@pytest.mark.parametrize("pinned", [(), ("gated",), ("standard", "gated")])
def test_pinned_initial_seed_of_one_row_is_a_condition(tmp_path, pinned):
    runs = loaded(sweep(tmp_path, {"standard": [4.0, 4.1], "gated": [3.9, 4.0]}))
    for run in runs:
        if run.variant in pinned:
            run.cfg = replace(run.cfg, model=replace(run.cfg.model, init_seed=1))
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
        "torch": "condition",
        "log_interval": "harmless",
    }
    report_command([str(tmp_path), "--json"])
    differences = json.loads(capsys.readouterr().out)["differences"]
    assert differences[2] == {
        "key": "log_interval",
        "role": "harmless",
        "values": {
            "10": ["standard torch=2.13.0 skip_step=nonfinite"],
            "5": ["gated torch=3.0 skip_step=off"],
        },
        "reason": "decides only which values are logged, and how often",
    }
    html = (tmp_path / "report.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert "Differences between these rows (3)" in html
    assert "attention=gated torch=3.0 train.skip_step=off log_interval=5" in html
