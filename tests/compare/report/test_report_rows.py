"""Rows of runs, baselines of rows, and notes about all other runs."""

import csv
import io
import json
import math
from dataclasses import replace
from itertools import permutations

import pytest
from runs.written import TINY, config, facts_of, loaded, metric_lines, parameters, sweep, write_run
from tiers import slow_but

from diffllm.compare.arms.run import Metrics, load_run
from diffllm.compare.report.comparison import compare
from diffllm.compare.report.rows import row_labels
from diffllm.compare.report.tables import csv_text
from diffllm.config import load_config
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.statistics.estimates import estimate

SPIKES = [
    f"{definition}/{series}_{what}"
    for what in ("score", "total")
    for definition in ("spikes", "spikes_olmo2")
    for series in ("loss", "grad")
]

FOUR = {
    "standard": [4.0, 4.2, 4.1],
    "gated": [3.95, 4.1, 4.05],
    "diff_v1": [3.9, 4.15, 4.0],
    "diff_v2": [3.8, 4.1, 3.9],
}

FILES = "data=files data.paths=[text.txt]"
HUB = "data=hub data.dataset=one/corpus"


def written(root, *runs):
    """Write and load runs, each given as ("variant key=value ...", loss, facts)."""
    paths = []
    for number, (words, *rest) in enumerate(runs):
        loss, facts = (*rest, *(4.0, None)[len(rest) :])
        overrides = f"attention={words}".split()
        paths.append(write_run(root / "abcdefgh"[number], *overrides, loss=loss, facts=facts))
    return loaded(paths)


def labels(comparison):
    return [row.label for row in comparison.rows]


def gaps(comparison):
    return {row.label: row.gap and round(row.gap.mean, 6) for row in comparison.rows}


def row_of(comparison, label):
    return next(row for row in comparison.rows if row.label == label)


def said(comparison, *parts):
    """Return the notes that contain all of `parts`."""
    return [note for note in comparison.notes if all(part in note for part in parts)]


def test_config_helper_returns_same_config_as_load_config():
    words = ("attention=diff_v2", "seed=7", "optim.lr=1e-3")
    assert config(words) == load_config([*TINY, *words])


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    return loaded(sweep(root, FOUR, "model.match_params_to=diff_v2"))


def test_comparison_of_sweep_has_one_table_row_per_attention_variant(four):
    assert len({run.cfg.model.ffn_dim for run in four}) > 1, "solved widths are not swept"
    found = compare(four, title="four")
    assert found.title == "four"
    assert found.baseline == "standard"
    assert labels(found) == ["standard", "gated", "diff_v1", "diff_v2"]
    assert (found.differences, found.notes) == ([], [])
    for row in found.rows:
        variant = row.keys["attention"]
        assert row.keys == {"attention": variant}
        assert [run.cfg.seed for run in row.runs] == [0, 1, 2]
        assert {run.variant for run in row.runs} == {variant}
        assert row.loss == estimate(FOUR[variant])
    gap = row_of(found, "diff_v2").gap
    assert gap == estimate([3.8 - 4.0, 4.1 - 4.2, 3.9 - 4.1])
    assert gap.seeds == 3
    bases = [row.baseline and row.baseline.label for row in found.rows]
    assert bases == [None, "standard", "standard", "standard"]


def test_comparison_does_not_depend_on_order_of_run_directories(four):
    runs = [run for run in four if run.variant in ("standard", "diff_v2")][1:5]
    for run in (runs[0], runs[-1]):  # Duplicate runs, which give notes.
        runs.append(replace(run, path=run.path / "again"))
    runs[1] = replace(runs[1], summary=None)
    reports = [compare(list(order)) for order in list(permutations(runs))[::7]]
    assert len(reports[0].notes) == 4
    contents = []
    for report in reports:
        runs_of_rows = [row.runs for row in report.rows]
        differences = report.row_differences, report.differences
        contents.append((csv_text(report.rows), runs_of_rows, report.notes, differences))
    assert all(content == contents[0] for content in contents)
    assert len({csv_text(report.rows) for report in reports}) == 1


def test_compare_uses_requested_variant_as_baseline(four):
    found = compare(four, "diff_v1")
    assert found.baseline == "diff_v1"
    assert row_of(found, "diff_v1").gap is None
    assert row_of(found, "standard").gap.mean == pytest.approx((0.1 + 0.05 + 0.1) / 3)
    with pytest.raises(ConfigError, match=r"diff_v3.*standard, gated, diff_v1, diff_v2"):
        compare(four, "diff_v3")
    assert compare([run for run in four if run.variant != "standard"]).baseline == "gated"
    alone = compare([run for run in four if run.variant == "gated"])
    assert alone.baseline is None
    assert alone.rows[0].gap is None


# Swept keys


PARAMS, FLOPS = "model.match_params_to=diff_v2", "model.match_flops_to=standard"
TO_STANDARD = "model.match_params_to=standard"
THIRD = "diff_v2_lambda_fixed model.attention.lambda_value=0.3"
PLAIN = [("standard", 4.0), ("diff_v2", 3.9)]
VALUES = [("diff_v2_no_lambda", 4.1), ("diff_v2_lambda_fixed", 3.8)]
SWEPT = {
    "every learning rate has separate rows and baselines": (
        [
            ("standard optim.lr=1e-3", 4.0),
            ("diff_v2 optim.lr=1e-3", 3.9),
            ("standard optim.lr=1e-2", 5.0),
            ("diff_v2 optim.lr=1e-2", 4.7),
        ],
        None,
        {
            "standard lr=0.001": None,
            "standard lr=0.01": None,
            "diff_v2 lr=0.001": -0.1,
            "diff_v2 lr=0.01": -0.3,
        },
    ),
    "no row of the baseline agrees": (
        [("standard optim.lr=1e-3", 4.0), ("diff_v2 optim.lr=2e-3", 3.0)],
        None,
        {"standard lr=0.001": None, "diff_v2 lr=0.002": None},
    ),
    "an override of a field is swept": (
        [*PLAIN, *VALUES, (THIRD, 3.7)],
        None,
        {
            "standard": None,
            "diff_v2": -0.1,
            "diff_v2_lambda_fixed lambda_value=0.3": -0.3,
            "diff_v2_lambda_fixed lambda_value=0.5": -0.2,
            "diff_v2_no_lambda": 0.1,
        },
    ),
    "the baseline is the row without overrides": (
        [*PLAIN, *VALUES, (THIRD, 3.7)],
        "diff_v2_lambda_fixed",
        {
            "standard": 0.2,
            "diff_v2": 0.1,
            "diff_v2_lambda_fixed lambda_value=0.3": -0.1,
            "diff_v2_lambda_fixed lambda_value=0.5": None,
            "diff_v2_no_lambda": 0.3,
        },
    ),
    "matching is swept": (
        [*PLAIN, (f"standard {PARAMS}", 3.95), (f"diff_v2 {PARAMS}", 3.9)],
        None,
        {
            "standard match_params_to=null": None,
            "standard match_params_to=diff_v2": None,
            "diff_v2 match_params_to=null": -0.1,
            "diff_v2 match_params_to=diff_v2": -0.05,
        },
    ),
    "baseline of a target is the row matched to the target": (
        [*PLAIN, ("gated", 3.95), (f"standard {PARAMS}", 3.92)],
        None,
        {
            "standard match_params_to=null": None,
            "standard match_params_to=diff_v2": None,
            "gated match_params_to=null": -0.05,
            "diff_v2 match_params_to=diff_v2": -0.02,
        },
    ),
    "a target of both sizes is the baseline of rows matched to either size": (
        [("standard", 4.0), (f"diff_v2 {TO_STANDARD}", 3.9), (f"diff_v2 {FLOPS}", 3.93)],
        None,
        {
            "standard match_flops_to=standard match_params_to=standard": None,
            "diff_v2 match_flops_to=null match_params_to=standard": -0.1,
            "diff_v2 match_flops_to=standard match_params_to=null": -0.07,
        },
    ),
    "unmatched rows have a gap next to matched rows": (
        [*PLAIN, (f"diff_v2 {TO_STANDARD}", 3.95)],
        None,
        {
            "standard match_params_to=standard": None,
            "diff_v2 match_params_to=null": -0.1,
            "diff_v2 match_params_to=standard": -0.05,
        },
    ),
    "the target itself counts as matched": (
        [("diff_v2", 3.9), (f"standard {PARAMS}", 4.0), (f"gated {PARAMS}", 4.1)],
        None,
        {"standard": None, "gated": 0.1, "diff_v2": -0.1},
    ),
    "a target of FLOPs counts as matched": (
        [("standard", 4.0), (f"diff_v2 {FLOPS}", 3.93), (f"gated {FLOPS}", 3.9)],
        None,
        {"standard": None, "gated": -0.1, "diff_v2": -0.07},
    ),
}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("case", SWEPT)
def test_loss_gap_uses_baseline_run_with_same_swept_values(tmp_path, case):
    runs, baseline, expected = SWEPT[case]
    found = compare(written(tmp_path, *runs), baseline)
    assert [*gaps(found).items()] == [*expected.items()]
    assert found.differences == []
    alone = case.startswith("no row")
    assert bool(said(found, "No gap for diff_v2 lr=0.002: no run of standard")) is alone
    if "target" in case and baseline is None:
        assert not said(found, "diff_v2", "makes runs of equal size")


@pytest.mark.parametrize("case", SWEPT)
def test_labels_of_planned_configs_equal_labels_in_report_of_finished_runs(tmp_path, case):
    runs = written(tmp_path, *SWEPT[case][0])
    reported = {run.path: row.label for row in compare(runs).rows for run in row.runs}
    assert row_labels([run.cfg for run in runs]) == [reported[run.path] for run in runs]


def test_row_labels_omit_seeds_keys_without_effect_and_letters_of_groups():
    same = [("seed=0",), ("seed=1",), ("seed=1", "micro_batch_size=2")]
    longer = ("steps=40", "seq_len=64", "optim.lr=3e-3", "optim.warmup_steps=3")
    configs = [config(words) for words in (*same, longer)]
    *short, whole = row_labels(configs)
    assert short == ["diff_v2 lr=0.002 warmup_steps=2 seq_len=32 steps=20"] * 3
    assert whole == "diff_v2 lr=0.003 warmup_steps=3 seq_len=64 steps=40"
    assert row_labels(configs[:3]) == ["diff_v2"] * 3


@pytest.mark.parametrize(
    "override",
    slow_but(["optim.weight_decay=0"], [
        "optim.weight_decay=0", "optim.beta2=0.99", "optim.clip_norm=0", "optim.eps=1e-6",
        "model.z_loss=1e-4", "model.init_std=0.1", "model.ffn_dim=512",
    ]),
)  # fmt: skip
def test_runs_that_differ_in_swept_key_are_comparable(tmp_path, override):
    swept = [(f"{variant} {override}", loss) for variant, loss in PLAIN]
    found = compare(written(tmp_path, *PLAIN, *swept))
    assert found.differences == []
    key = override.partition("=")[0]
    assert [set(row.keys) for row in found.rows] == [{"attention", key}] * 4
    assert all(f" {key.rpartition('.')[2]}=" in row.label for row in found.rows)
    assert list(gaps(found).values()) == [None, None, -0.1, -0.1]


OF_NO_EFFECT = [
    "micro_batch_size=2", "compile=true", "activation_checkpointing=full", "log_interval=5",
    "eval.interval=7", "checkpoint.interval=3", "diagnostics.interval=5", "wandb.project=x",
    "model.attention.backend=reference", "data.num_workers=0", "data.cache_dir=/elsewhere",
    "data.paths=[same-text.txt]", "data.tokenizer=same.model", "data.sample_prompt=x",
    "parallel=hsdp", "run.name=another", "model.loss_chunk=64", "precision=fp32",
    "resume=never", "distributed.timeout=60", "model.attention.values=split", "force=true",
]  # fmt: skip


@pytest.mark.parametrize(
    "override",
    slow_but(
        ["micro_batch_size=2", "data.cache_dir=/elsewhere", "model.attention.values=split"],
        OF_NO_EFFECT,
    ),
)
def test_comparison_ignores_config_keys_without_effect_on_loss(tmp_path, override):
    variant = "diff_v1" if "values" in override else "standard"
    base = f"{variant} {FILES}"
    found = compare(written(tmp_path, (base, 4.0), (f"{base} seed=1 {override}", 4.1)))
    assert labels(found) == [variant]
    assert found.rows[0].loss.seeds == 2
    assert found.differences == []


# Keys and facts that make rows incomparable

INCOMPARABLE = {
    "steps=40": "steps",
    "seq_len=64": "seq_len",
    "global_batch_size=16": "global_batch_size",
    "optim=wsd": "optim.schedule",
    "optim.warmup_steps=3": "optim.warmup_steps",
    "optim.decay_fraction=0.5": "optim.decay_fraction",
    "optim.min_lr_ratio=0": "optim.min_lr_ratio",
    "eval.sequences=8": "eval.sequences",
    "data.heldout_fraction=0.1": "data.heldout_fraction",
    "data.packing=best_fit": "data.packing",
    "data.mask_documents=true": "data.mask_documents",
    "model.dim=64": "model.dim",
    "model.n_layers=1": "model.n_layers",
    "model.n_kv_heads=4": "model.n_kv_heads",
    "model.head_dim=16": "model.head_dim",
    "model.qk_norm=true": "model.qk_norm",
    "model.tie_embeddings=true": "model.tie_embeddings",
    "model.rope.theta=100": "model.rope.theta",
    "model.vocab_size=1024": "model.vocab_size",
    "resume=/another/run": "resume",
}


@pytest.mark.parametrize(
    ("override", "key"),
    slow_but(
        [(word, INCOMPARABLE[word]) for word in ("steps=40", "optim=wsd", "model.dim=64")],
        INCOMPARABLE.items(),
    ),
)
def test_comparison_mentions_config_key_that_makes_runs_incomparable(tmp_path, override, key):
    found = compare(written(tmp_path, ("standard", 4.0), (f"diff_v2 {override}", 3.0)))
    assert list(found.differences) == [key]
    standard, _ = labels(found)
    assert standard.startswith(f"standard {key.rpartition('.')[2]}=")
    assert [row.gap for row in found.rows] == [None, None]
    assert [row.loss.mean for row in found.rows] == [4.0, 3.0]
    assert all(key in row.values["incomparable"] for row in found.rows)


@pytest.mark.parametrize("fact", ["corpus", "tokenizer", "compute_dtype"])
def test_comparison_mentions_run_json_entry_that_makes_runs_incomparable(tmp_path, fact):
    other = {fact: "0123456789abcdef"}
    runs = [("standard", 4.0), ("diff_v2", 3.0, other), ("standard seed=1", 4.0, other)]
    found = compare(written(tmp_path, *runs))
    assert list(found.differences) == [fact]
    text = other[fact] if fact == "compute_dtype" else "01234567"  # Hashes are shortened.
    changed = f"{fact}={text}"
    (group,) = (each for each in found.groups if each.values[fact] == text)
    assert [row.label for row in group.rows] == [f"standard {changed}", f"diff_v2 {changed}"]
    assert all(row.gap is None for row in found.rows)  # Comparable rows share no seed.


NONE = {"corpus": None, "tokenizer": None, "compute_dtype": None}


def test_comparison_uses_data_config_if_run_json_lacks_corpus(tmp_path):
    other = f"gated {HUB} data.dataset=other/corpus"
    runs = [(f"standard {HUB}", 4.0, NONE), (f"gated {HUB}", 4.0, NONE), (other, 4.0, NONE)]
    runs = written(tmp_path, *runs)
    found = compare(runs[:2])
    assert found.differences == []
    assert found.rows[1].gap is not None
    (note,) = said(found, "run.json does not record corpus, tokenizer, compute_dtype.")
    assert note in found.notes
    assert list(compare(runs).differences) == ["data.dataset"]
    runs[0] = replace(runs[0], facts=facts_of("attention=standard"))
    found = compare(runs)
    assert "data.dataset" in found.differences
    assert [row.gap for row in found.rows] == [None] * 3


def test_comparison_computes_no_gap_if_one_run_json_is_empty(tmp_path):
    runs = written(tmp_path, ("standard",), ("gated",), ("standard",), ("diff_v2",))
    runs[2:] = [replace(run, facts={}) for run in runs[2:]]
    found = compare(runs[:2] + runs[3:])
    assert found.differences == ["compute_dtype", "corpus", "heldout_tokens", "tokenizer", "torch"]
    unknown = dict.fromkeys(found.differences, "unknown")
    (group,) = (each for each in found.groups if each.values == unknown)
    (label,) = (row.label for row in group.rows)
    assert label == "B: diff_v2"
    assert [row.gap is not None for row in found.rows] == [False, True, False]
    assert found.rows[2].values["parameters"] is None
    assert said(found, "d: run.json does not record corpus, tokenizer, compute_dtype, heldout_tok")
    bases = [row.gap is not None for row in compare(runs).rows]
    # Both runs of the last pair lack facts, so their configs are compared.
    assert bases == [False, True, False, True]


def test_runs_are_incomparable_if_heldout_token_counts_differ(tmp_path):
    """Older versions measured only `eval.sequences` samples, without recording tokens."""
    variants = ("standard", "gated", "standard", "gated", "standard")
    counts = (None, None, 5000, 5000, 12_345_678_901)
    older, older_gated, whole, gated, other = written(
        tmp_path,
        *((v, 4.0, {"heldout_tokens": n}) for v, n in zip(variants, counts, strict=True)),
    )
    for pair in ([older, older_gated], [whole, gated]):
        found = compare(pair)
        assert found.differences == []
        assert found.rows[1].gap is not None
        assert not said(found, "record")
    found = compare([older, gated])
    assert [row.gap for row in found.rows] == [None, None]
    assert {group.values["heldout_tokens"] for group in found.groups} == {"unknown", "5000"}
    (note,) = said(found, "does not record heldout_tokens")
    assert str(older.path) in note
    values = {group.values["heldout_tokens"] for group in compare([whole, other]).groups}
    assert values == {"5000", "12345678901"}


def test_runs_are_comparable_if_eval_tokens_exceed_heldout_size(
    tmp_path,
):
    part = ("gated eval.tokens=900", 4.0, {"heldout_tokens": 1000})
    whole, more, part = written(tmp_path, ("standard",), ("gated eval.tokens=1e7",), part)
    assert compare([whole, more]).differences == []
    found = compare([whole, part])
    assert sorted(found.differences) == ["eval.tokens", "heldout_tokens"]
    assert "gated tokens=900" in labels(found)


def test_labels_of_runs_of_several_lengths_omit_eval_tokens_that_follow_from_length(tmp_path):
    runs = [(f"standard steps={n} eval.tokens=auto", 4.0, {"heldout_tokens": n}) for n in (20, 40)]
    found = compare(written(tmp_path, *runs))
    assert labels(found) == ["standard steps=20", "standard steps=40"]
    assert {"steps", "eval.tokens"} <= {*found.differences}


@pytest.mark.parametrize("override", ["steps=40", "optim.lr=0.5", "attention=diff_v1"])
def test_additional_runs_with_different_config_do_not_change_loss_gaps(tmp_path, override):
    runs = loaded(sweep(tmp_path / "a", {"standard": [4.0, 4.2], "diff_v2": [3.9, 4.0]}))
    before = compare(runs)
    others = [(f"{variant} {override} seed=7", 1.0) for variant in ("standard", "diff_v2")]
    after = compare([*runs, *written(tmp_path, *others)])
    two = {(row.keys["attention"], row.loss): row.gap for row in after.rows if row.loss.seeds == 2}
    assert two == {(row.keys["attention"], row.loss): row.gap for row in before.rows}


def test_long_row_label_is_shortened_to_group_letter_and_variant(tmp_path):
    many = "steps=40 seq_len=64 optim.lr=3e-3 optim.warmup_steps=3 model.dim=64"
    runs = written(tmp_path, ("standard", 4.0), ("gated", 3.9), (f"standard {many}", 4.0))
    found = compare(runs)
    assert labels(found) == ["A: standard", "A: gated", "B: standard"]
    assert found.groups[0].values.keys() == found.groups[1].values.keys()
    assert {"steps", "seq_len", "optim.lr", "model.dim"} <= found.groups[1].values.keys()
    assert found.groups[1].values["steps"] == "40"
    assert found.rows[1].gap.mean == pytest.approx(-0.1)


# Notes


def test_unfinished_run_is_excluded_from_mean_loss_and_loss_gap(tmp_path):
    paths = sweep(tmp_path, {"standard": [4.0, 4.2], "diff_v2": [3.9, None], "gated": [None]})
    found = compare(loaded(paths))
    assert labels(found) == ["standard", "gated", "diff_v2"]
    gated, diff_v2 = found.rows[1:]
    assert gated.loss is gated.gap is gated.values["loss"] is gated.values["hidden_top1"] is None
    assert gated.values["seeds"] == 0
    assert gated.values["parameters"] > 0
    assert len(gated.runs[0].series("train/loss").tokens) == 2
    assert len(diff_v2.runs) == 2
    assert (diff_v2.loss.seeds, diff_v2.gap.seeds, diff_v2.values["seeds"]) == (1, 1, 1)
    assert [row.diverged for row in found.rows] == [0, 0, 0]
    assert gated.baseline is None
    assert diff_v2.gap.mean == pytest.approx(-0.1)
    assert len(said(found, "has not finished: step 10 of 20")) == 2
    assert said(found, "gap of diff_v2 to standard uses only seed 0", "seed 1.")


def test_mean_loss_excludes_runs_without_finite_heldout_loss(tmp_path):
    runs = written(tmp_path, ("standard", 4.0), ("standard seed=1", math.nan), ("standard seed=2",))
    runs[2].summary["heldout_loss"] = None
    found = compare(runs)
    (row,) = found.rows
    assert (row.loss.mean, row.loss.seeds) == (4.0, 1)
    assert row.diverged == row.values["seeds_diverged"] == 2
    assert len(said(found, "is not finite")) == 2


def test_loss_gap_uses_only_seeds_common_to_variant_and_baseline(tmp_path):
    seeds = {"standard": (0, 1, 2), "diff_v2": (2, 1, 5), "gated": (8,)}
    words = [(f"{variant} seed={seed}",) for variant, own in seeds.items() for seed in own]
    found = compare(written(tmp_path, *words))
    assert row_of(found, "diff_v2").gap.seeds == 2
    assert row_of(found, "gated").gap is None
    assert said(found, "gap of diff_v2 to standard uses only seed 1, 2", "seed 0, 5.")
    assert said(found, "gap of gated to standard is unknown")


def test_loss_gap_compares_runs_with_equal_seed_and_init_seed(tmp_path):
    one = "model.init_seed=1"
    runs = [("standard", 4.0), (f"standard {one}", 5.0), ("gated", 3.9), (f"gated {one}", 4.9)]
    found = compare(written(tmp_path, *runs))
    assert labels(found) == ["standard", "gated"]
    gap = found.rows[1].gap
    assert (gap.mean, gap.low, gap.high, gap.seeds) == pytest.approx((-0.1, -0.1, -0.1, 2))


@pytest.mark.parametrize("newest", ["a", "b"])
def test_comparison_uses_newest_finished_run_of_each_seed(tmp_path, newest):
    for name, loss in (("a", 4.0), ("b", 5.0)):
        written = 2e9 if name == newest else 1e9
        write_run(tmp_path / name, "attention=standard", loss=loss, written=written)
    write_run(tmp_path / "c", "attention=standard", loss=None, written=3e9)
    for order in permutations("abc"):
        found = compare(loaded([tmp_path / name for name in order]))
        assert [run.path.name for run in found.rows[0].runs] == [newest]
        assert found.rows[0].loss.mean == {"a": 4.0, "b": 5.0}[newest]
        other = {"a": "b", "b": "a"}[newest]
        assert said(found, f"{tmp_path / other} is skipped", f"{tmp_path / newest} is newer")
        assert said(found, f"{tmp_path / 'c'} is skipped", "finished")
        assert len(found.notes) == 2


def test_note_about_different_parameter_counts_suggests_match_params_to(tmp_path):
    names = ("standard", "gated", "diff_v2")
    found = compare(written(tmp_path, *((name,) for name in names)))
    standard, gated, diff_v2 = (parameters((f"attention={name}", "seed=0")) for name in names)
    for name, count in (("gated", gated), ("diff_v2", diff_v2)):
        percent = f"{100 * (count / standard - 1):.1f}%"
        mend = f"model.match_params_to={name} makes runs of equal size"
        assert said(found, f"{name} has {percent} more parameters than standard", mend)
    assert len(found.notes) == 2
    found = compare([run for row in found.rows for run in row.runs], "diff_v2")
    fewer = f"{100 * (1 - standard / diff_v2):.1f}% fewer"
    assert said(found, f"standard has {fewer} parameters than diff_v2")


@pytest.mark.parametrize(("count", "notes"), [(1_005_000, 0), (1_005_100, 1), (994_900, 1)])
def test_comparison_adds_note_if_parameter_counts_differ_above_tolerance(tmp_path, count, notes):
    counts = {"standard": 1_000_000, "gated": count}
    runs = written(tmp_path, *((name, 4.0, {"parameters": n}) for name, n in counts.items()))
    assert len(compare(runs).notes) == notes


@pytest.mark.parametrize(
    ("facts", "named"), [({"device": "H"}, "device (CPU, H)"), ({"ranks": 8}, "ranks (1, 8)")]
)
def test_comparison_computes_loss_gap_despite_different_hardware(tmp_path, facts, named):
    other = ("standard_sink compile=true", 4.0, facts | {"compiled": True})
    found = compare(written(tmp_path, ("standard", 4.0, {"compiled": False}), other))
    assert found.differences == []
    assert found.rows[1].gap is not None
    (note,) = found.notes
    assert note.startswith("Tokens per second and MFU are not comparable")
    assert "compile (null, true), compiled (false, true)" in note
    assert named in note


def test_comparison_adds_note_on_damaged_lines_of_metrics_file(tmp_path):
    path = write_run(tmp_path / "a", "attention=standard")
    file = path / "metrics.jsonl"
    with open(file, "a", encoding="utf-8") as f:
        f.write('{"step": 30, "tok')
    found = compare(loaded([path]))
    assert found.notes == []
    assert found.rows[0].runs[0].series("train/loss").tokens.tolist() == [256, 2560, 5120]
    lines = file.read_text(encoding="utf-8").splitlines()
    huge = f'{{"step": 1, "tokens": {10**30}}}'
    broken = [lines[0], "{", "[1]", '{"step": null, "tokens": 3}', huge, *lines[1:3]]
    file.write_text("\n".join(broken), encoding="utf-8")  # The last line lacks only the line break.
    (run,) = loaded([path])
    assert (len(run.metrics.steps), run.metrics.skipped) == (3, 4)
    assert said(compare([run]), "skipped 4 damaged or misplaced lines")


# Columns


def test_report_csv_summarizes_each_metric_over_seeds(tmp_path):
    for seed in (0, 1):
        lines = metric_lines(20, 256, 4.0)
        for line in lines:
            line["perf/mfu"] = 0.4 + seed / 10
            line["perf/tokens_per_s"] += 100 * seed
            line["train/grad_norm"] *= 1 + seed
            for layer in range(2):
                line[f"context_rms_min/layer_{layer:02d}"] += seed
                line[f"context_rms_max/layer_{layer:02d}"] += seed
        lines[1]["train/grad_norm"] = None
        counts = {"spikes/loss_total": 2.0 + seed, "spikes/skipped_total": 3}
        bits = {"heldout_bits_per_byte": 1.5 + seed / 2}
        words = ("attention=standard", f"seed={seed}")
        write_run(
            tmp_path / f"s{seed}", *words, loss=4.0 + seed, lines=lines, summary=counts | bits
        )
    write_run(tmp_path / "g", "attention=gated", loss=3.5, lines=[])
    found = compare(loaded(sorted(tmp_path.iterdir())))
    standard, gated = (row.values for row in found.rows)
    assert list(standard) == list(gated)
    facts = facts_of("attention=standard", "seed=0")
    expected = {
        "variant": "standard",
        **{k: facts[k] for k in ("parameters", "active_parameters", "flops_per_token")},
        "tokens": 20 * 8 * 32,
        "seeds": 2,
        "loss": 4.5,
        "loss_low": found.rows[0].loss.low,
        "loss_high": found.rows[0].loss.high,
        "bits_per_byte": 1.75,
        "seeds_diverged": 0,
        **dict.fromkeys(("baseline", "gap", "gap_seeds", "incomparable", "group", "seconds")),
        **{name: 2.0 if name.endswith("total") else 0.1 for name in SPIKES},
        "spikes/loss_total": 2.5,
        "spikes/skipped_total": 3.0,
        "train/grad_norm": 6.0,
        "hidden_top1": 20 - 0.1,
        "hidden_kurtosis": 6.0,
        "context_rms_min": 0.03,
        "context_rms_max": 1 + 1 + 1 - 0.02,
        "perf/tokens_per_s": 1060.0,
        "perf/mfu": 0.45,
    }
    for name, value in expected.items():
        assert standard[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    assert (gated["gap"], gated["gap_low"]) == (pytest.approx(-0.5), None)
    assert (gated["gap_seeds"], gated["baseline"]) == (1, "standard")
    assert gated["spikes/loss_score"] == 0.1
    for name in ("train/grad_norm", "hidden_top1", "context_rms_min", "perf/tokens_per_s",
                 "spikes/skipped_total", "perf/mfu", "bits_per_byte"):  # fmt: skip
        assert gated[name] is None, name


def test_by_layer_sorts_layers_by_number_if_model_has_over_99_layers(tmp_path):
    lines = metric_lines(20, 256, 4.0, layers=103)
    (run,) = loaded([write_run(tmp_path / "a", "attention=standard", lines=lines)])
    last = run.by_layer("hidden_kurtosis").values[-1]
    assert last.tolist() == pytest.approx([5.0 + layer for layer in range(103)])
    assert run.by_layer("nothing").values.shape == (0, 0)
    run = replace(run, metrics=Metrics([{**lines[0], "hidden_top1/layer_00": None}]))
    assert math.isnan(run.by_layer("hidden_top1").values[0, 0])


def test_report_csv_keeps_full_precision_of_numbers(four):
    found = compare([run for run in four if run.variant in ("standard", "diff_v1")])
    header, *lines = csv.reader(io.StringIO(csv_text(found.rows)))
    assert header == list(found.rows[0].values)
    for row, line in zip(found.rows, lines, strict=True):
        for value, cell in zip(row.values.values(), line, strict=True):
            read = cell if isinstance(value, str) else json.loads(cell) if cell else None
            assert read == value


# Versions of plugins


def test_runs_with_different_plugin_code_have_separate_rows(tmp_path):
    old, new = ({"plugin_code": {"own": version, "m": "x"}} for version in ("1a", "2b"))
    runs = [("standard", 4.0, old), ("gated", 3.9, old), ("standard", 4.2, new)]
    found = compare(written(tmp_path, *runs, ("gated", 3.8, new)))
    assert found.differences == ["plugins"]
    assert gaps(found) == {
        "standard plugins=own@1a": None,
        "gated plugins=own@1a": -0.1,
        "standard plugins=own@2b": None,
        "gated plugins=own@2b": -0.4,
    }


def test_run_without_recorded_plugin_hash_has_separate_row(tmp_path):
    run, other = loaded(sweep(tmp_path, {"gated": [4.0, 4.2]}))
    run.facts["plugin_code"] = {"own": "1a"}
    assert len(compare([run, other]).rows) == 1, "a run without the plugin"
    other.cfg.plugins = ["own"]
    assert labels(compare([run, other])) == [
        "gated plugins=own@1a",
        "gated plugins=own@unknown",
    ]


# Runs whose config changed during training


def write_config_change(path, step, **made):
    (path / "changes.jsonl").write_text(
        json.dumps({"step": step, "changes": made}) + "\n", encoding="utf-8"
    )


def test_loss_gap_excludes_run_with_config_change_during_training(
    tmp_path,
):
    paths = sweep(tmp_path / "a", {"standard": [4.0, 4.2], "diff_v2": [3.9, 4.0]})
    before = compare(loaded(paths))
    extended = write_run(tmp_path / "b", "attention=diff_v2", "seed=0", loss=1.0)
    write_config_change(extended, 10, steps=[10, 20])
    after = compare(loaded([*paths, extended]))
    assert labels(after) == ["standard", "diff_v2", "diff_v2 changed"]
    assert [row.gap for row in after.rows[:2]] == [row.gap for row in before.rows]
    assert after.rows[2].gap is None
    assert after.differences == ["changed"]
    changed = "b has no gap: its config changed during training (steps 10 to 20 after step 10)"
    assert said(after, changed)
    assert not said(after, "is skipped")


@pytest.mark.parametrize(("step", "gap"), [(10, None), (0, -0.1)])
def test_comparison_computes_no_loss_gap_if_config_changed_after_step_0(tmp_path, step, gap):
    paths = sweep(tmp_path, {"standard": [4.0], "diff_v2": [3.9]})
    for path in paths:
        write_config_change(path, step, **{"optim.lr": [1e-3, 2e-3]})
    found = compare(loaded(paths))
    assert gaps(found) == {"standard": None, "diff_v2": gap}
    assert len(said(found, "its config changed during training")) == (0 if gap else 2)


@pytest.mark.parametrize("text", ["{", "[]\n", '{"step": 3}\n', '{"step": 3, "changes": [1]}\n'])
def test_load_run_raises_checkpoint_error_if_changes_jsonl_is_damaged(tmp_path, text):
    path = write_run(tmp_path / "a", "attention=standard")
    (path / "changes.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"changes\.jsonl (is not JSON|contains a line without)"
    ):
        load_run(path)
