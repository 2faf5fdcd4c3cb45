"""Rows of runs, baselines of rows, and notes about all other runs."""

import csv
import io
import json
import math
from dataclasses import replace
from itertools import permutations

import pytest
from runs.json_files import write_jsonl
from runs.written import (
    TINY,
    facts_of,
    falling_lines,
    loaded,
    parameter_count,
    run_config,
    runs_in,
    sweep,
    write_run,
)

from diffllm.compare.arms.run import Metrics
from diffllm.compare.report.comparison import compare
from diffllm.compare.report.rows import row_labels
from diffllm.compare.report.tables import csv_text
from diffllm.config import load_config
from diffllm.core.errors import ConfigError
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


HUB = "data=hub data.dataset=one/corpus"


def loaded_runs(root, *runs):
    """Write and load runs, each given as ("variant key=value ...", loss, facts)."""
    paths = []
    for number, (words, *details) in enumerate(runs):
        loss = details[0] if details else 4.0
        facts = details[1] if len(details) > 1 else None
        overrides = f"attention={words}".split()
        paths.append(write_run(root / "abcdefgh"[number], *overrides, loss=loss, facts=facts))
    return loaded(paths)


def labels(comparison):
    return [row.label for row in comparison.rows]


def gaps(comparison):
    return {row.label: row.gap and round(row.gap.mean, 6) for row in comparison.rows}


def row_of(comparison, label):
    return next(row for row in comparison.rows if row.label == label)


def notes_with(comparison, *parts):
    """Return the notes that contain all of `parts`."""
    return [note for note in comparison.notes if all(part in note for part in parts)]


def test_config_helper_returns_same_config_as_load_config():
    words = ("attention=diff_v2", "seed=7", "optim.lr=1e-3")
    assert run_config(words) == load_config([*TINY, *words])


@pytest.fixture(scope="module")
def four_arms(tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    return loaded(sweep(root, FOUR, "model.match_params_to=diff_v2"))


def test_comparison_of_sweep_has_one_table_row_per_attention_variant(four_arms):
    assert len({run.cfg.model.ffn_dim for run in four_arms}) > 1, "solved widths are not swept"
    comparison = compare(four_arms, title="four")
    assert comparison.title == "four"
    assert comparison.baseline == "standard"
    assert labels(comparison) == ["standard", "gated", "diff_v1", "diff_v2"]
    assert (comparison.differences, comparison.notes) == ([], [])
    for row in comparison.rows:
        variant = row.keys["attention"]
        assert row.keys == {"attention": variant}
        assert [run.cfg.seed for run in row.runs] == [0, 1, 2]
        assert {run.variant for run in row.runs} == {variant}
        assert row.loss == estimate(FOUR[variant])
    gap = row_of(comparison, "diff_v2").gap
    assert gap == estimate([3.8 - 4.0, 4.1 - 4.2, 3.9 - 4.1])
    assert gap.seeds == 3
    bases = [row.baseline and row.baseline.label for row in comparison.rows]
    assert bases == [None, "standard", "standard", "standard"]


def test_comparison_does_not_depend_on_order_of_run_directories(four_arms):
    runs = [run for run in four_arms if run.variant in ("standard", "diff_v2")][1:5]
    for run in (runs[0], runs[-1]):  # Duplicate runs, which give notes.
        runs.append(replace(run, path=run.path / "again"))
    runs[1] = replace(runs[1], summary=None)
    comparisons = [compare(list(order)) for order in list(permutations(runs))[::7]]
    first = comparisons[0]
    assert len(first.notes) == 4
    for comparison in comparisons:
        assert csv_text(comparison.rows) == csv_text(first.rows)
        assert [row.runs for row in comparison.rows] == [row.runs for row in first.rows]
        assert comparison.notes == first.notes
        assert comparison.row_differences == first.row_differences
        assert comparison.differences == first.differences


def test_compare_uses_requested_variant_as_baseline(four_arms):
    comparison = compare(four_arms, "diff_v1")
    assert comparison.baseline == "diff_v1"
    assert row_of(comparison, "diff_v1").gap is None
    assert row_of(comparison, "standard").gap.mean == pytest.approx((0.1 + 0.05 + 0.1) / 3)
    with pytest.raises(ConfigError, match=r"diff_v3.*standard, gated, diff_v1, diff_v2"):
        compare(four_arms, "diff_v3")
    assert compare([run for run in four_arms if run.variant != "standard"]).baseline == "gated"
    alone = compare([run for run in four_arms if run.variant == "gated"])
    assert alone.baseline is None
    assert alone.rows[0].gap is None


# Swept keys


PARAMS, FLOPS = "model.match_params_to=diff_v2", "model.match_flops_to=standard"
TO_STANDARD = "model.match_params_to=standard"
FIXED = "diff_v2_lambda_fixed"


SWEPT = {
    "every learning rate has separate rows and baselines": [
        ("standard optim.lr=1e-3", 4.0, "standard lr=0.001", None),
        ("standard optim.lr=1e-2", 5.0, "standard lr=0.01", None),
        ("diff_v2 optim.lr=1e-3", 3.9, "diff_v2 lr=0.001", -0.1),
        ("diff_v2 optim.lr=1e-2", 4.7, "diff_v2 lr=0.01", -0.3),
    ],
    "no row of the baseline agrees": [
        ("standard optim.lr=1e-3", 4.0, "standard lr=0.001", None),
        ("diff_v2 optim.lr=2e-3", 3.0, "diff_v2 lr=0.002", None),
    ],
    "an override of a field is swept": [
        ("standard", 4.0, "standard", None),
        ("diff_v2", 3.9, "diff_v2", -0.1),
        (f"{FIXED} model.attention.lambda_value=0.3", 3.7, f"{FIXED} lambda_value=0.3", -0.3),
        (FIXED, 3.8, f"{FIXED} lambda_value=0.5", -0.2),
        ("diff_v2_no_lambda", 4.1, "diff_v2_no_lambda", 0.1),
    ],
    "matching is swept": [
        ("standard", 4.0, "standard match_params_to=null", None),
        (f"standard {PARAMS}", 3.95, "standard match_params_to=diff_v2", None),
        ("diff_v2", 3.9, "diff_v2 match_params_to=null", -0.1),
        (f"diff_v2 {PARAMS}", 3.9, "diff_v2 match_params_to=diff_v2", -0.05),
    ],
    "baseline of a target is the row matched to the target": [
        ("standard", 4.0, "standard match_params_to=null", None),
        (f"standard {PARAMS}", 3.92, "standard match_params_to=diff_v2", None),
        ("gated", 3.95, "gated match_params_to=null", -0.05),
        ("diff_v2", 3.9, "diff_v2 match_params_to=diff_v2", -0.02),
    ],
    "a target of both sizes is the baseline of rows matched to either size": [
        ("standard", 4.0, "standard match_flops_to=standard match_params_to=standard", None),
        (f"diff_v2 {TO_STANDARD}", 3.9,
         "diff_v2 match_flops_to=null match_params_to=standard", -0.1),
        (f"diff_v2 {FLOPS}", 3.93, "diff_v2 match_flops_to=standard match_params_to=null", -0.07),
    ],
    "unmatched rows have a gap next to matched rows": [
        ("standard", 4.0, "standard match_params_to=standard", None),
        ("diff_v2", 3.9, "diff_v2 match_params_to=null", -0.1),
        (f"diff_v2 {TO_STANDARD}", 3.95, "diff_v2 match_params_to=standard", -0.05),
    ],
    "the target itself counts as matched": [
        (f"standard {PARAMS}", 4.0, "standard", None),
        (f"gated {PARAMS}", 4.1, "gated", 0.1),
        ("diff_v2", 3.9, "diff_v2", -0.1),
    ],
    "a target of FLOPs counts as matched": [
        ("standard", 4.0, "standard", None),
        (f"gated {FLOPS}", 3.9, "gated", -0.1),
        (f"diff_v2 {FLOPS}", 3.93, "diff_v2", -0.07),
    ],
}  # fmt: skip
"""Overrides and loss of a run, and label and gap of its row, in the order of rows."""


@pytest.mark.parametrize("case", SWEPT)
def test_loss_gap_uses_baseline_run_with_same_swept_values(tmp_path, case):
    rows = SWEPT[case]
    runs = loaded_runs(tmp_path, *((overrides, loss) for overrides, loss, _, _ in rows))
    comparison = compare(runs[::-1])
    assert [*gaps(comparison).items()] == [(label, gap) for _, _, label, gap in rows]
    assert comparison.differences == []
    is_alone = case.startswith("no row")
    note = "No gap for diff_v2 lr=0.002: no run of standard"
    assert bool(notes_with(comparison, note)) is is_alone
    if "target" in case:
        assert not notes_with(comparison, "diff_v2", "makes runs of equal size")
    assert row_labels([run.cfg for run in runs]) == labels(comparison), "labels of planned runs"


def test_requested_baseline_is_the_row_without_overrides(tmp_path):
    rows = SWEPT["an override of a field is swept"]
    runs = loaded_runs(tmp_path, *((overrides, loss) for overrides, loss, _, _ in rows))
    assert [*gaps(compare(runs, FIXED)).values()] == [0.2, 0.1, -0.1, None, 0.3]


def test_row_labels_omit_seeds_keys_without_effect_and_letters_of_groups():
    same = [("seed=0",), ("seed=1",), ("seed=1", "micro_batch_size=2")]
    longer = ("steps=40", "seq_len=64", "optim.lr=3e-3", "optim.warmup_steps=3")
    configs = [run_config(words) for words in (*same, longer)]
    *short, whole = row_labels(configs)
    assert short == ["diff_v2 lr=0.002 warmup_steps=2 seq_len=32 steps=20"] * 3
    assert whole == "diff_v2 lr=0.003 warmup_steps=3 seq_len=64 steps=40"
    assert row_labels(configs[:3]) == ["diff_v2"] * 3


@pytest.mark.parametrize(
    ("variant", "override"),
    [
        ("standard", "micro_batch_size=2"),
        ("standard", "data.cache_dir=/elsewhere"),
        ("diff_v1", "model.attention.values=split"),
    ],
)
def test_comparison_ignores_config_keys_without_effect_on_loss(tmp_path, variant, override):
    base = f"{variant} data=files data.paths=[text.txt]"
    comparison = compare(loaded_runs(tmp_path, (base, 4.0), (f"{base} seed=1 {override}", 4.1)))
    assert labels(comparison) == [variant]
    assert comparison.rows[0].loss.seeds == 2
    assert comparison.differences == []


# Keys and facts that make rows incomparable; test_report_differences.py compares all keys


def test_comparison_mentions_config_key_that_makes_runs_incomparable(tmp_path):
    comparison = compare(loaded_runs(tmp_path, ("standard", 4.0), ("diff_v2 optim=wsd", 3.0)))
    assert comparison.differences == ["optim.schedule"]
    assert labels(comparison) == ["standard schedule=cosine", "diff_v2 schedule=wsd"]
    assert [row.gap for row in comparison.rows] == [None, None]
    assert [row.loss.mean for row in comparison.rows] == [4.0, 3.0]
    assert all("optim.schedule" in row.values["incomparable"] for row in comparison.rows)


@pytest.mark.parametrize(
    ("fact", "text"),  # Hashes are shortened.
    [("corpus", "01234567"), ("tokenizer", "01234567"), ("compute_dtype", "0123456789abcdef")],
)
def test_comparison_mentions_run_json_entry_that_makes_runs_incomparable(tmp_path, fact, text):
    facts = {fact: "0123456789abcdef"}
    runs = [("standard", 4.0), ("diff_v2", 3.0, facts), ("standard seed=1", 4.0, facts)]
    comparison = compare(loaded_runs(tmp_path, *runs))
    assert list(comparison.differences) == [fact]
    (group,) = (group for group in comparison.groups if group.values[fact] == text)
    changed = f"{fact}={text}"
    assert [row.label for row in group.rows] == [f"standard {changed}", f"diff_v2 {changed}"]
    assert all(row.gap is None for row in comparison.rows)  # Comparable rows share no seed.


NONE = {"corpus": None, "tokenizer": None, "compute_dtype": None}


def test_comparison_uses_data_config_if_run_json_lacks_corpus(tmp_path):
    other = f"gated {HUB} data.dataset=other/corpus"
    runs = [(f"standard {HUB}", 4.0, NONE), (f"gated {HUB}", 4.0, NONE), (other, 4.0, NONE)]
    runs = loaded_runs(tmp_path, *runs)
    comparison = compare(runs[:2])
    assert comparison.differences == []
    assert comparison.rows[1].gap is not None
    assert notes_with(comparison, "run.json does not record corpus, tokenizer, compute_dtype.")
    assert list(compare(runs).differences) == ["data.dataset"]
    runs[0] = replace(runs[0], facts=facts_of("attention=standard"))
    comparison = compare(runs)
    assert "data.dataset" in comparison.differences
    assert [row.gap for row in comparison.rows] == [None] * 3


def test_comparison_computes_no_gap_if_one_run_json_is_empty(tmp_path):
    runs = loaded_runs(tmp_path, ("standard",), ("gated",), ("standard",), ("diff_v2",))
    standard, gated = runs[:2]
    unknown_standard, unknown_v2 = [replace(run, facts={}) for run in runs[2:]]
    comparison = compare([standard, gated, unknown_v2])
    facts = ["compute_dtype", "corpus", "heldout_tokens", "tokenizer", "torch"]
    assert comparison.differences == facts
    assert comparison.groups[1].values == dict.fromkeys(facts, "unknown")
    assert [row.label for row in comparison.groups[1].rows] == ["B: diff_v2"]
    assert [row.gap is not None for row in comparison.rows] == [False, True, False]
    assert comparison.rows[2].values["parameters"] is None
    note = "d: run.json does not record corpus, tokenizer, compute_dtype, heldout_tok"
    assert notes_with(comparison, note)
    # Both runs of the last pair lack facts, so their configs are compared.
    comparison = compare([standard, gated, unknown_standard, unknown_v2])
    assert [row.gap is not None for row in comparison.rows] == [False, True, False, True]


def test_runs_are_incomparable_if_heldout_token_counts_differ(tmp_path):
    """Older versions measured only `eval.sequences` samples, without recording tokens."""
    variants = ("standard", "gated", "standard", "gated", "standard")
    counts = (None, None, 5000, 5000, 12_345_678_901)
    runs = []
    for variant, count in zip(variants, counts, strict=True):
        runs.append((variant, 4.0, {"heldout_tokens": count}))
    older, older_gated, standard, gated, longer = loaded_runs(tmp_path, *runs)
    for pair in ([older, older_gated], [standard, gated]):
        comparison = compare(pair)
        assert comparison.differences == []
        assert comparison.rows[1].gap is not None
        assert not notes_with(comparison, "record")
    comparison = compare([older, gated])
    assert [row.gap for row in comparison.rows] == [None, None]
    counts_of_groups = {group.values["heldout_tokens"] for group in comparison.groups}
    assert counts_of_groups == {"unknown", "5000"}
    (note,) = notes_with(comparison, "does not record heldout_tokens")
    assert str(older.path) in note
    groups = compare([standard, longer]).groups
    assert {group.values["heldout_tokens"] for group in groups} == {"5000", "12345678901"}


def test_runs_are_comparable_if_eval_tokens_exceed_heldout_size(tmp_path):
    part = ("gated eval.tokens=900", 4.0, {"heldout_tokens": 1000})
    whole, more, part = loaded_runs(tmp_path, ("standard",), ("gated eval.tokens=1e7",), part)
    assert compare([whole, more]).differences == []
    comparison = compare([whole, part])
    assert sorted(comparison.differences) == ["eval.tokens", "heldout_tokens"]
    assert "gated tokens=900" in labels(comparison)


def test_labels_of_runs_of_several_lengths_omit_eval_tokens_that_follow_from_length(tmp_path):
    runs = [(f"standard steps={n} eval.tokens=auto", 4.0, {"heldout_tokens": n}) for n in (20, 40)]
    comparison = compare(loaded_runs(tmp_path, *runs))
    assert labels(comparison) == ["standard steps=20", "standard steps=40"]
    assert {"steps", "eval.tokens"} <= {*comparison.differences}


@pytest.mark.parametrize("override", ["steps=40", "optim.lr=0.5", "attention=diff_v1"])
def test_additional_runs_with_different_config_do_not_change_loss_gaps(tmp_path, override):
    runs = loaded(sweep(tmp_path / "a", {"standard": [4.0, 4.2], "diff_v2": [3.9, 4.0]}))
    others = [(f"{variant} {override} seed=7", 1.0) for variant in ("standard", "diff_v2")]
    comparison = compare([*runs, *loaded_runs(tmp_path, *others)])
    rows = [row for row in comparison.rows if row.loss.seeds == 2]
    expected = [(row.keys["attention"], row.loss, row.gap) for row in compare(runs).rows]
    assert [(row.keys["attention"], row.loss, row.gap) for row in rows] == expected


def test_long_row_label_is_shortened_to_group_letter_and_variant(tmp_path):
    many = "steps=40 seq_len=64 optim.lr=3e-3 optim.warmup_steps=3 model.dim=64"
    runs = loaded_runs(tmp_path, ("standard", 4.0), ("gated", 3.9), (f"standard {many}", 4.0))
    comparison = compare(runs)
    assert labels(comparison) == ["A: standard", "A: gated", "B: standard"]
    assert comparison.groups[0].values.keys() == comparison.groups[1].values.keys()
    assert {"steps", "seq_len", "optim.lr", "model.dim"} <= comparison.groups[1].values.keys()
    assert comparison.groups[1].values["steps"] == "40"
    assert comparison.rows[1].gap.mean == pytest.approx(-0.1)


# Notes


def test_unfinished_run_is_excluded_from_mean_loss_and_loss_gap(tmp_path):
    paths = sweep(tmp_path, {"standard": [4.0, 4.2], "diff_v2": [3.9, None], "gated": [None]})
    comparison = compare(loaded(paths))
    assert labels(comparison) == ["standard", "gated", "diff_v2"]
    gated, diff_v2 = comparison.rows[1:]
    assert gated.loss is gated.gap is gated.values["loss"] is gated.values["hidden_top1"] is None
    assert gated.values["seeds"] == 0
    assert gated.values["parameters"] > 0
    assert len(gated.runs[0].series("train/loss").tokens) == 2
    assert len(diff_v2.runs) == 2
    assert (diff_v2.loss.seeds, diff_v2.gap.seeds, diff_v2.values["seeds"]) == (1, 1, 1)
    assert [row.diverged for row in comparison.rows] == [0, 0, 0]
    assert gated.baseline is None
    assert diff_v2.gap.mean == pytest.approx(-0.1)
    assert len(notes_with(comparison, "has not finished: step 10 of 20")) == 2
    assert notes_with(comparison, "gap of diff_v2 to standard uses only seed 0", "seed 1.")


def test_loss_gap_uses_only_seeds_common_to_variant_and_baseline(tmp_path):
    seeds_by_variant = {"standard": (0, 1, 2), "diff_v2": (2, 1, 5), "gated": (8,)}
    runs = []
    for variant, seeds in seeds_by_variant.items():
        runs += [(f"{variant} seed={seed}",) for seed in seeds]
    comparison = compare(loaded_runs(tmp_path, *runs))
    assert row_of(comparison, "diff_v2").gap.seeds == 2
    assert row_of(comparison, "gated").gap is None
    assert notes_with(comparison, "gap of diff_v2 to standard uses only seed 1, 2", "seed 0, 5.")
    assert notes_with(comparison, "gap of gated to standard is unknown")


def test_loss_gap_compares_runs_with_equal_seed_and_init_seed(tmp_path):
    one = "model.init_seed=1"
    runs = [("standard", 4.0), (f"standard {one}", 5.0), ("gated", 3.9), (f"gated {one}", 4.9)]
    comparison = compare(loaded_runs(tmp_path, *runs))
    assert labels(comparison) == ["standard", "gated"]
    gap = comparison.rows[1].gap
    assert (gap.mean, gap.low, gap.high, gap.seeds) == pytest.approx((-0.1, -0.1, -0.1, 2))


@pytest.mark.parametrize("newest", ["a", "b"])
def test_comparison_uses_newest_finished_run_of_each_seed(tmp_path, newest):
    for name, loss in (("a", 4.0), ("b", 5.0)):
        written = 2e9 if name == newest else 1e9
        write_run(tmp_path / name, "attention=standard", loss=loss, written=written)
    write_run(tmp_path / "c", "attention=standard", loss=None, written=3e9)
    comparison = compare(runs_in(tmp_path))
    assert [run.path.name for run in comparison.rows[0].runs] == [newest]
    assert comparison.rows[0].loss.mean == {"a": 4.0, "b": 5.0}[newest]
    other = {"a": "b", "b": "a"}[newest]
    reason = f"{tmp_path / newest} is newer"
    assert notes_with(comparison, f"{tmp_path / other} is skipped", reason)
    assert notes_with(comparison, f"{tmp_path / 'c'} is skipped", "finished")
    assert len(comparison.notes) == 2


def test_note_about_different_parameter_counts_suggests_match_params_to(tmp_path):
    names = ("standard", "gated", "diff_v2")
    runs = loaded_runs(tmp_path, *((name,) for name in names))
    comparison = compare(runs)
    standard, gated, diff_v2 = (parameter_count((f"attention={name}", "seed=0")) for name in names)
    for name, count in (("gated", gated), ("diff_v2", diff_v2)):
        excess = f"{name} has {100 * (count / standard - 1):.1f}% more parameters than standard"
        fix = f"model.match_params_to={name} makes runs of equal size"
        assert notes_with(comparison, excess, fix)
    assert len(comparison.notes) == 2
    fewer = f"standard has {100 * (1 - standard / diff_v2):.1f}% fewer parameters than diff_v2"
    assert notes_with(compare(runs, "diff_v2"), fewer)


@pytest.mark.parametrize(("count", "notes"), [(1_005_000, 0), (1_005_100, 1), (994_900, 1)])
def test_comparison_adds_note_if_parameter_counts_differ_above_tolerance(tmp_path, count, notes):
    counts = {"standard": 1_000_000, "gated": count}
    runs = loaded_runs(tmp_path, *((name, 4.0, {"parameters": n}) for name, n in counts.items()))
    assert len(compare(runs).notes) == notes


@pytest.mark.parametrize(
    ("facts", "named"), [({"device": "H"}, "device (CPU, H)"), ({"ranks": 8}, "ranks (1, 8)")]
)
def test_comparison_computes_loss_gap_despite_different_hardware(tmp_path, facts, named):
    other = ("standard_sink compile=true", 4.0, facts | {"compiled": True})
    comparison = compare(loaded_runs(tmp_path, ("standard", 4.0, {"compiled": False}), other))
    assert comparison.differences == []
    assert comparison.rows[1].gap is not None
    (note,) = comparison.notes
    assert note.startswith("Tokens per second and MFU are not comparable")
    assert "compile (null, true), compiled (false, true)" in note
    assert named in note


def test_comparison_adds_note_on_damaged_lines_of_metrics_file(tmp_path):
    path = write_run(tmp_path / "a", "attention=standard")
    file = path / "metrics.jsonl"
    with open(file, "a", encoding="utf-8") as f:
        f.write('{"step": 30, "tok')
    comparison = compare(loaded([path]))
    assert comparison.notes == []
    assert comparison.rows[0].runs[0].series("train/loss").tokens.tolist() == [256, 2560, 5120]
    lines = file.read_text(encoding="utf-8").splitlines()
    huge = f'{{"step": 1, "tokens": {10**30}}}'
    broken = [lines[0], "{", "[1]", '{"step": null, "tokens": 3}', huge, *lines[1:3]]
    file.write_text("\n".join(broken), encoding="utf-8")  # The last line lacks only the line break.
    (run,) = loaded([path])
    assert (len(run.metrics.steps), run.metrics.skipped) == (3, 4)
    assert notes_with(compare([run]), "skipped 4 damaged or misplaced lines")


# Columns


def test_report_csv_summarizes_each_metric_over_seeds(tmp_path):
    for seed in (0, 1):
        lines = falling_lines(20, 256, 4.0)
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
        summary = counts | bits
        write_run(tmp_path / f"s{seed}", *words, loss=4.0 + seed, lines=lines, summary=summary)
    write_run(tmp_path / "g", "attention=gated", loss=3.5, lines=[])
    comparison = compare(runs_in(tmp_path))
    standard, gated = (row.values for row in comparison.rows)
    assert list(standard) == list(gated)
    facts = facts_of("attention=standard", "seed=0")
    expected = {
        "variant": "standard",
        **{k: facts[k] for k in ("parameters", "active_parameters", "flops_per_token")},
        "tokens": 20 * 8 * 32,
        "seeds": 2,
        "loss": 4.5,
        "loss_low": comparison.rows[0].loss.low,
        "loss_high": comparison.rows[0].loss.high,
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
    lines = falling_lines(20, 256, 4.0, layers=103)
    (run,) = loaded([write_run(tmp_path / "a", "attention=standard", lines=lines)])
    last = run.by_layer("hidden_kurtosis").values[-1]
    assert last.tolist() == pytest.approx([5.0 + layer for layer in range(103)])
    assert run.by_layer("nothing").values.shape == (0, 0)
    run = replace(run, metrics=Metrics([{**lines[0], "hidden_top1/layer_00": None}]))
    assert math.isnan(run.by_layer("hidden_top1").values[0, 0])


def test_report_csv_keeps_full_precision_of_numbers(four_arms):
    comparison = compare([run for run in four_arms if run.variant in ("standard", "diff_v1")])
    header, *lines = csv.reader(io.StringIO(csv_text(comparison.rows)))
    assert header == list(comparison.rows[0].values)
    for row, line in zip(comparison.rows, lines, strict=True):
        for value, cell in zip(row.values.values(), line, strict=True):
            read = cell if isinstance(value, str) else json.loads(cell) if cell else None
            assert read == value


# Versions of plugins


def test_runs_with_different_plugin_code_have_separate_rows(tmp_path):
    old, new = ({"plugin_code": {"own": version, "m": "x"}} for version in ("1a", "2b"))
    runs = [("standard", 4.0, old), ("gated", 3.9, old), ("standard", 4.2, new)]
    comparison = compare(loaded_runs(tmp_path, *runs, ("gated", 3.8, new)))
    assert comparison.differences == ["plugins"]
    assert gaps(comparison) == {
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
    assert labels(compare([run, other])) == ["gated plugins=own@1a", "gated plugins=own@unknown"]


# Runs whose config changed during training


def write_config_change(path, step, **made):
    write_jsonl(path / "changes.jsonl", [{"step": step, "changes": made}])


def test_loss_gap_excludes_run_with_config_change_during_training(tmp_path):
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
    assert notes_with(after, changed)
    assert not notes_with(after, "is skipped")


@pytest.mark.parametrize(("step", "gap"), [(10, None), (0, -0.1)])
def test_comparison_computes_no_loss_gap_if_config_changed_after_step_0(tmp_path, step, gap):
    paths = sweep(tmp_path, {"standard": [4.0], "diff_v2": [3.9]})
    for path in paths:
        write_config_change(path, step, **{"optim.lr": [1e-3, 2e-3]})
    comparison = compare(loaded(paths))
    assert gaps(comparison) == {"standard": None, "diff_v2": gap}
    assert len(notes_with(comparison, "its config changed during training")) == (0 if gap else 2)
