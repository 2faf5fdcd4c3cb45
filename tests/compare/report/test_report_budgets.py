"""Gaps at equal tokens, FLOPs and seconds, on curves with known values."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from report_pages import undrawn_page
from runs.json_files import read_jsonl
from runs.written import loaded, run_config, runs_in, write_lines, write_run, write_train_seconds
from scipy.special import stdtrit

from diffllm.compare.arms.budget import BUDGETS, flops_spent
from diffllm.compare.arms.run import Series
from diffllm.compare.report.comparison import compare
from diffllm.compare.report.curves import gap_band, sample_gaps, seed_noise
from diffllm.compare.report.terminal import table_text
from diffllm.config.matching import totals

TOKENS = 8 * 32
FLOPS = {"standard": 2e6, "gated": 3e6}
STEP_MS = {"standard": 100.0, "gated": 125.0}
SLOPE = 0.5


def loss(variant, tokens, seed=0):
    """Return a loss that is a line over the logarithm of tokens."""
    return 6 - SLOPE * math.log(tokens) - 0.1 * (variant == "gated") + 0.01 * seed


def write_budget_run(path, variant, seed=0, curve=loss, steps=(5, 10, 15, 20), **facts):
    lines = [
        {
            "step": step,
            "tokens": step * TOKENS,
            "train/loss": 5.0,
            "eval/loss": curve(variant, step * TOKENS, seed),
            "perf/step_ms": STEP_MS[variant],
        }
        for step in steps
    ]
    known = {"flops_per_token": FLOPS[variant], **facts}
    last = lines[-1]["eval/loss"]
    overrides = (f"attention={variant}", f"seed={seed}")
    return write_run(path, *overrides, lines=lines, facts=known, loss=last)


def budget_comparison(tmp_path, **how):
    for variant in ("standard", "gated"):
        for seed in (0, 1):
            write_budget_run(tmp_path / f"{variant}{seed}", variant, seed, **how)
    return compare(runs_in(tmp_path))


def test_arms_with_one_loss_curve_have_no_gap_at_equal_flops_if_costs_differ(tmp_path):
    """Reading the longer arm in the middle of its schedule would show a gap."""

    def one_curve(variant, tokens, seed):
        return 6 - SLOPE * math.log(tokens * FLOPS[variant]) + 0.01 * seed

    comparison = budget_comparison(tmp_path, curve=one_curve)
    (_, gated) = comparison.rows
    end = 20 * TOKENS
    assert list(gated.equal) == ["tokens"]
    assert gated.equal["tokens"].at == end
    assert gated.equal["tokens"].gap.mean == pytest.approx(-SLOPE * math.log(1.5), abs=1e-6)
    assert gated.values["gap_at_tokens"] == gated.equal["tokens"].gap.mean
    assert gated.values["gap_at_flops"] is gated.values["gap_at_seconds"] is None
    note = "No gap at equal FLOPs or equal seconds: plan such runs with <code>train.budget.flops"
    assert undrawn_page(comparison).count(note) == 1


def write_budgeted(path, variant, seed, final_loss, **facts):
    """Write a finished run with train.budget.flops=1e11 and evaluations at half and at the end."""
    words = ("train.budget.flops=1e11", f"attention={variant}", f"seed={seed}")
    cfg = run_config(words)
    lines = [
        {"step": step, "tokens": step * TOKENS, "train/loss": 5.0, "eval/loss": loss}
        for step, loss in ((cfg.steps // 2, 5.5), (cfg.steps, final_loss))
    ]
    facts = {"flops_per_token": totals(cfg.model)["flops"], **facts}
    return write_run(path, *words, lines=lines, facts=facts, loss=final_loss)


def test_runs_of_one_budget_in_flops_have_gap_of_final_losses(tmp_path):
    losses = {"standard": (4.0, 4.1, 4.3), "diff_v2": (3.9, 3.95, 4.2)}
    for variant, by_seed in losses.items():
        for seed, final_loss in enumerate(by_seed):
            write_budgeted(tmp_path / f"{variant}{seed}", variant, seed, final_loss)
    comparison = compare(runs_in(tmp_path))
    _, v2 = comparison.rows
    lengths = [row.runs[0].cfg.steps for row in comparison.rows]
    assert lengths[0] > 1.05 * lengths[1]
    assert [row.label for row in comparison.rows] == ["standard", "diff_v2"]
    assert len(comparison.groups) == 1
    assert v2.equal.keys() == {"flops"}
    assert v2.equal["flops"].gap == v2.gap
    assert v2.gap.mean == pytest.approx(np.mean([-0.1, -0.15, -0.1]))
    assert v2.equal["flops"].at == pytest.approx(1e11, rel=0.01)
    assert (v2.trend, gap_band(v2), sample_gaps(v2, v2.baseline)) == (None, None, {})
    assert any(note.startswith("Not at equal tokens: diff_v2.") for note in comparison.notes)
    reasons = {found.key: found.reason for found in comparison.row_differences}
    assert reasons["steps"] == "budget is compared instead"
    html = undrawn_page(comparison)
    assert "No gap at equal seconds: plan such runs with <code>budget</code> in a study." in html
    titles = ("Loss over tokens", "Loss over FLOPs")
    assert all(html.count(f"<h3>{title}</h3>") == 1 for title in titles)


def test_runs_of_two_budgets_are_not_compared(tmp_path):
    write_budgeted(tmp_path / "a", "standard", 0, 4.0)
    words = ("train.budget.flops=1.02e11", "attention=diff_v2")
    write_run(tmp_path / "b", *words, facts={"flops_per_token": 4e6})
    comparison = compare(runs_in(tmp_path))
    assert len(comparison.groups) == 2
    assert comparison.rows[1].gap is None


@pytest.mark.parametrize("known", [False, True])
def test_runs_of_one_budget_with_unequal_flops_are_not_compared_if_flops_are_known(tmp_path, known):
    """A budget of few steps is rounded to 7 and 6 steps."""
    for variant in ("standard", "diff_v2"):
        words = ("train.budget.flops=7e9", f"attention={variant}")
        facts = {"flops_per_token": totals(run_config(words).model)["flops"] if known else None}
        write_run(tmp_path / variant, *words, facts=facts)
    comparison = compare(runs_in(tmp_path))
    assert {row.runs[0].cfg.steps for row in comparison.rows} == {6, 7}
    assert len(comparison.groups) == 1 + known
    assert [row.gap is None for row in comparison.rows] == [True, known]
    reason = (
        "Runs of train.budget.flops=7e+09 with different steps are not compared: the FLOPs per run "
        "(6.507B to 7.137B) differ by 9.7%; the limit is 3%."
    )
    assert comparison.warnings == [reason] * known
    printed = " ".join(table_text(comparison).split())
    assert (f"warning: {reason}" in printed) == known
    assert (f"Warning: {reason}" in undrawn_page(comparison)) == known


def test_runs_of_one_budget_with_other_shares_of_warmup_are_not_compared(tmp_path):
    for variant, warmup_steps in (("standard", 2), ("diff_v2", 10)):
        words = ("train.budget.flops=1e11", f"attention={variant}")
        write_run(tmp_path / variant, *words, f"optim.warmup_steps={warmup_steps}")
    comparison = compare(runs_in(tmp_path))
    assert len(comparison.groups) == 2
    assert "optim.warmup_steps" in comparison.differences
    reason = "optim.warmup_steps is 2% and 11% of the steps, not an equal share."
    (warning,) = comparison.warnings
    assert warning.endswith(reason)


def write_timed(path, variant, steps, step_seconds, seed=0, **facts):
    """Write the run of a study with `step_seconds` seconds per step in steps.npy."""
    words = (f"attention={variant}", f"seed={seed}", f"steps={steps}")
    words += ("run.study=d1ge57/deciding/arm",)
    lines = [{"step": steps, "tokens": steps * TOKENS, "train/loss": 5.0, "eval/loss": 4.0}]
    facts = {"flops_per_token": FLOPS[variant], **facts}
    write_run(path, *words, lines=lines, facts=facts, loss=4.0 - 0.1 * (variant == "gated"))
    write_train_seconds(path, [step_seconds] * steps)


@pytest.mark.parametrize(
    ("step_seconds", "facts", "equal"),
    [
        (0.125, {}, {"seconds"}),
        (0.128, {}, {"seconds"}),  # 2.4% more
        (0.130, {}, None),
        (0.125, {"device": "H100"}, None),
        (0.125, {"flops_per_token": 2.5e6}, {"flops", "seconds"}),
    ],
)
def test_runs_of_study_are_compared_at_seconds_of_one_machine(tmp_path, step_seconds, facts, equal):
    write_timed(tmp_path / "a", "standard", 100, 0.1)
    write_timed(tmp_path / "b", "gated", 80, step_seconds, **facts)
    comparison = compare(runs_in(tmp_path))
    row = comparison.rows[1]
    assert len(comparison.warnings) == (equal is None)
    for warning in comparison.warnings:
        assert warning.startswith("Runs of study d1ge57 deciding with different steps are not")
        assert ("different machines" in warning) == ("device" in facts)
    assert (len(comparison.groups) == 1) == (equal is not None)
    assert set(row.equal) == (equal or set())
    if equal:
        assert row.equal["seconds"].gap.mean == pytest.approx(-0.1)


def test_unfinished_run_of_a_study_does_not_prevent_comparison_at_equal_seconds(tmp_path):
    for seed in range(2):
        write_timed(tmp_path / f"a{seed}", "standard", 100, 0.1, seed)
        write_timed(tmp_path / f"b{seed}", "gated", 80, 0.125, seed)
    for name in ("summary.json", "steps.npy"):
        (tmp_path / "b1" / name).unlink()
    write_train_seconds(tmp_path / "b1", [0.125] * 40)
    comparison = compare(runs_in(tmp_path))
    assert len(comparison.groups) == 1
    (_, gated) = comparison.rows
    assert gated.gap.seeds == 1
    assert gated.equal.keys() == {"seconds"}


def test_runs_that_differ_in_steps_without_a_plan_are_not_compared(tmp_path):
    """The runs have equal FLOPs."""
    for variant, steps in (("standard", 30), ("gated", 20)):
        words = (f"attention={variant}", f"steps={steps}")
        write_run(tmp_path / variant, *words, facts={"flops_per_token": FLOPS[variant]})
    assert len(compare(runs_in(tmp_path)).groups) == 2


KEYS = {5: 20.0, 10: 4.0, 15: 10.0, 20: 6.0}
"""Visible keys by logged step, over the steps since the last logged step; mean 10."""
PER_KEY = {"standard": 1e4, "gated": 3e4}


def test_training_flops_are_computed_from_logged_visible_keys(tmp_path):
    for variant, per_key in PER_KEY.items():
        path = write_budget_run(tmp_path / variant, variant, flops_per_visible_key=per_key)
        file = path / "metrics.jsonl"
        lines = read_jsonl(file)
        write_lines(path, [{**line, "data/visible_keys": KEYS[line["step"]]} for line in lines])
    _, gated = runs = loaded([tmp_path / "standard", tmp_path / "gated"])
    for run in runs:
        per_token, per_key = FLOPS[run.variant], PER_KEY[run.variant]
        without_attention = per_token - per_key * (32 + 1) / 2
        assert run.facts["flops_per_token"] == pytest.approx(without_attention + 10 * per_key)
        interval_flops = [5 * TOKENS * (without_attention + n * per_key) for n in KEYS.values()]
        spent = np.cumsum(interval_flops)
        tokens = np.array([5, 7.5, 10, 15, 20]) * TOKENS
        expected = [spent[0], (spent[0] + spent[1]) / 2, *spent[1:]]
        assert flops_spent(run, tokens) == pytest.approx(np.array(expected))
    row = compare(runs).rows[1]
    assert row.values["flops_per_token"] == gated.facts["flops_per_token"]


def test_equal_costs_need_recorded_flops_and_one_machine(tmp_path):
    paths = [
        write_budget_run(tmp_path / "a", "standard", flops_per_token=3e6, device="H100"),
        write_budget_run(tmp_path / "b", "gated", device="CPU"),
        write_budget_run(tmp_path / "c", "gated", 1, flops_per_token=None),
    ]
    standard, gated, unknown = loaded(paths)
    assert BUDGETS["flops"].equal_cost([[standard], [gated]]) == 20 * TOKENS * 3e6
    assert BUDGETS["flops"].equal_cost([[gated], [unknown]]) is None
    assert BUDGETS["seconds"].equal_cost([[standard], [gated]]) is None
    assert BUDGETS["seconds"].equal_cost([[gated], [unknown]]) == pytest.approx(20 * 0.125)
    assert BUDGETS["tokens"].equal_cost([[standard], [unknown]]) == 20 * TOKENS


def test_equal_costs_compare_means_of_arms(tmp_path):
    arms = []
    for variant, step_seconds in (("standard", (0.1, 0.12)), ("gated", (0.111, 0.111))):
        paths = []
        for seed, seconds in enumerate(step_seconds):
            paths.append(tmp_path / f"{variant}{seed}")
            write_timed(paths[-1], variant, 20, seconds, device="CPU")
        arms.append(loaded(paths))
    assert BUDGETS["seconds"].equal_cost(arms) == pytest.approx(20 * 0.1105)
    (_, slower), gated = arms
    assert BUDGETS["seconds"].equal_cost([[slower], gated]) is None


def test_loss_gap_at_equal_cost_excludes_diverged_seeds(tmp_path):
    for seed in (0, 1):
        write_budget_run(tmp_path / f"a{seed}", "standard", seed)
    write_budget_run(tmp_path / "b0", "gated", 0)
    path = write_budget_run(tmp_path / "b1", "gated", 1, curve=lambda *_: math.nan)
    (path / "summary.json").write_text('{"heldout_loss": NaN, "steps": 20}', encoding="utf-8")
    (_, gated) = compare(runs_in(tmp_path)).rows
    assert gated.diverged == 1
    assert {found.gap.seeds for found in gated.equal.values()} == {1}


def test_seed_noise_floor_is_computed_from_pooled_variance(tmp_path):
    deviation = {"standard": 0.02, "gated": 0.04}

    def noisy(variant, tokens, seed):
        return loss(variant, tokens) + deviation[variant] * (2 * seed - 1) / math.sqrt(2)

    rows = budget_comparison(tmp_path, curve=noisy).rows
    floor = seed_noise(rows)
    pooled = math.sqrt((0.02**2 + 0.04**2) / 2)
    assert np.allclose(floor.values, stdtrit(2, 0.975) * pooled * math.sqrt(2 / 2))
    assert list(floor.tokens) == [step * TOKENS for step in (5, 10, 15, 20)]
    assert seed_noise([rows[0]]).values[0] == pytest.approx(stdtrit(1, 0.975) * 0.02)


def test_95_percent_of_random_loss_gaps_are_below_seed_noise_floor():
    rng = np.random.default_rng(0)

    losses = rng.normal(size=(2, 3, 4000))
    rows = []
    for losses_of_row in losses:
        runs = []
        for values in losses_of_row:
            curve = Series(np.arange(1, 4001), values)
            runs.append(SimpleNamespace(series=lambda name, curve=curve: curve))
        rows.append(SimpleNamespace(runs=runs))
    gap = np.subtract(*losses.mean(axis=1))
    covered = np.abs(gap) <= seed_noise(rows).values
    assert covered.mean() == pytest.approx(0.95, abs=0.012)
