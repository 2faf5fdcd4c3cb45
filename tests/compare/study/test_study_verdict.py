"""Verdicts on runs whose losses are known."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from runs.json_files import write_json
from runs.written import (
    ALIKE,
    LOWER,
    SOONER,
    TWO_ARMS,
    edit_json,
    edit_text,
    study_file,
    write_arms,
    write_ended,
    write_lines,
    write_rates,
)
from tiers import slow_but

from diffllm.cli import main
from diffllm.compare.arms.sentences import clock
from diffllm.compare.study import planned_runs
from diffllm.compare.study.arms import lr_sensitivity
from diffllm.compare.study.costs import costs
from diffllm.compare.study.file import load_study
from diffllm.compare.study.rates import choose_rates, next_runs, rate_runs
from diffllm.compare.study.raw_values import read_values, values_text
from diffllm.compare.study.running import check_study_runs, run_study
from diffllm.compare.study.verdict import judge, judge_evidence
from diffllm.compare.study.verdict_page import gaps_of_pairs, verdict_page
from diffllm.config import load_config, saved
from diffllm.config.matching import totals
from diffllm.config.plugins import config_directory
from diffllm.config.saved import load_run_config
from diffllm.core.errors import ConfigError

HALF, BETTER = [4.40, 4.41, 4.39], [4.30, 4.312, 4.289]
RATES = "{grid: [0.001, 0.002, 0.004], seeds: [100], steps: 10, extend: 1}"
NAN = math.nan
STUDIES = config_directory() / "study"


def judged(tmp_path, rule, v2, half=HALF, **more):
    """The verdict on runs of two arms that ended with these losses."""
    study = study_file(tmp_path / "study.yaml", rule, **TWO_ARMS, **more)
    write_arms(study, tmp_path / "out", {"half": half, "v2": v2})
    return judge(study, tmp_path / "out")


def test_study_verdict_contains_number_of_diverged_runs_per_arm(tmp_path):
    verdict = judged(tmp_path, LOWER, [4.30, 4.312, NAN])
    assert verdict.verdict == verdict.would_be == "underpowered"
    numbers = json.loads(json.dumps(verdict.numbers(), allow_nan=False))
    assert numbers["arms"]["v2"]["diverged"] == 1
    assert numbers["arms"]["v2"]["values"]["2"] is None
    assert "1 of 3 runs of v2" in numbers["reasons"][0]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("counts", [(2, 60_000), (20, 49_999), (20, 50_000)])
@pytest.mark.parametrize(
    "words",
    [["report", "out"], ["study", "verdict", "study.yaml", "out=out"], ["power", "out", "gap=0.1"]],
)
def test_commands_warn_if_heldout_text_is_below_minimum_size(workplace, capsys, words, counts):
    judged(workplace, LOWER, BETTER)
    documents, tokens = counts
    for file in workplace.glob("out/*/summary.json"):
        edit_json(file, heldout_documents=documents, heldout_tokens=tokens)
    assert main(words) == 0
    pages = [page.read_text(encoding="utf-8") for page in workplace.glob("out/*.html")]
    warning = f"held-out text: only {documents} documents and {tokens:,} tokens (minimum: 20 "
    expected_count = 0 if counts == (20, 50_000) else 1
    for shown in (capsys.readouterr().out, *pages):
        text = " ".join(shown.split())
        assert text.count(warning) == expected_count
        assert text.count("increase data.heldout_fraction") == expected_count


def judge_edited(tmp_path, old, new):
    """Judge the runs in tmp_path/out by their study file with `old` replaced."""
    edit_text(tmp_path / "study.yaml", old, new)
    return judge(load_study(tmp_path / "study.yaml"), tmp_path / "out")


def test_verdict_of_saved_study_names_replacement_of_margin(tmp_path):
    rule = LOWER.replace("}", ", margin: 0.02}")
    verdict = judged(tmp_path, rule, BETTER, also=f"[{rule}]")
    assert verdict.verdict == "shown"
    notes = [reason for reason in verdict.reasons if "margin=0.02 has no effect" in reason]
    assert len(notes) == 1
    assert verdict_page(verdict).markdown().count("add a rule with kind=equivalence to also") == 1


def test_verdict_is_exploratory_if_study_file_was_edited_after_runs(tmp_path):
    judged(tmp_path, LOWER, BETTER)
    verdict = judge_edited(tmp_path, "below: 0.0", "below: -0.05")
    assert (verdict.verdict, verdict.would_be) == ("exploratory", "shown")
    assert "6 of 6 runs began under another version of study.yaml" in verdict.reasons[0]
    verdict = judge_edited(tmp_path, "arm: v2, against: half", "arm: half, against: v2")
    assert verdict.would_be == "refuted"
    assert "p of the opposite claim" in verdict_page(verdict).markdown()


def test_verdict_is_exploratory_if_study_has_unfinished_runs(tmp_path):
    verdict = judged(tmp_path, LOWER, [4.30, 4.312])
    assert (verdict.verdict, verdict.would_be) == ("exploratory", "shown")
    assert "1 run has not ended: v2-seed2" in verdict.reasons[0]
    assert [run.name for run in next_runs(verdict.study, tmp_path / "out")] == ["v2-seed2"]


def test_config_of_planned_matches_load_config(tmp_path):
    study = study_file(tmp_path / "study.yaml", LOWER, **TWO_ARMS, lr=RATES)
    for arm in study.arms:
        (planned,) = planned_runs.deciding_runs(study, arm, 2**40, 0.3)
        cfg = planned_runs.config_of_planned(planned)
        words = ["eval.tokens=null", *planned.words]  # as `start_words` adds
        assert cfg == load_config([*words, "run.report=false"])
        assert (cfg.seed, cfg.model.init_seed, cfg.optim.lr) == (2**40, 2**40, 0.3)


NOTE = "not the reference corpus: numpy 2.3.0 (reference 2.4.6)"


@pytest.mark.parametrize(
    ("half", "v2", "reason"),
    [
        ({"corpus_note": NOTE}, {"corpus_note": NOTE}, f"corpus: {NOTE}"),
        (
            {"plugin_code": {"own": "1a"}},
            {"plugin_code": {"own": "2b"}},
            "runs differ in the code of the plugin own: 1a, 2b",
        ),
    ],
)
def test_verdict_is_not_comparable_if_data_or_code_of_runs_differs(tmp_path, half, v2, reason):
    study = study_file(tmp_path / "study.yaml", LOWER, **TWO_ARMS)
    write_arms(study, tmp_path / "out", {"half": HALF}, **half)
    write_arms(study, tmp_path / "out", {"v2": BETTER}, **v2)
    verdict = judge(study, tmp_path / "out")
    assert verdict.verdict == "not comparable"
    assert verdict.reasons[0].startswith(reason)


def test_check_study_runs_raises_error_if_plugin_code_has_changed(tmp_path):
    study = study_file(tmp_path / "study.yaml", LOWER, **TWO_ARMS)
    write_arms(study, tmp_path / "out", {"half": HALF}, plugin_code={"own": "1a"})
    runs = {"half-seed0": ["run.study=1/deciding/half"]}
    write_json(tmp_path / "out" / "sweep.json", {"runs": runs})
    with pytest.raises(ConfigError, match=r"half-seed0 was started with other plugin code \(plug"):
        check_study_runs(study, tmp_path / "out", 1)
    with pytest.raises(ConfigError, match="arm half: global_batch_size"):
        check_study_runs(study, tmp_path / "new", 7)


def test_verdict_is_not_comparable_if_config_changed_during_a_run(tmp_path):
    study = judged(tmp_path, LOWER, BETTER).study
    (tmp_path / "out/v2-seed0/changes.jsonl").write_text("", encoding="utf-8")
    verdict = judge(study, tmp_path / "out")
    assert verdict.verdict == "not comparable"
    reason = "v2-seed0 is not the run of the study: its config changed during the run"
    assert reason in verdict.reasons
    assert "\n\nNot comparable; the runs alone give: held" in verdict_page(verdict).markdown()


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_run_with_layer_that_is_not_finite_has_no_smallest_outlier(tmp_path, number):
    study = judged(tmp_path, LOWER, BETTER, metric="hidden_top1").study
    for seed, value in enumerate((2.9, 2.91, 2.89)):
        file = tmp_path / f"out/v2-seed{seed}/metrics.jsonl"
        layers = f'"hidden_top1/layer_00": {value}, "hidden_top1/layer_01": {number}'
        file.write_text(f'{{"step": 20, "tokens": 5120, {layers}}}\n', encoding="utf-8")
    verdict = judge(study, tmp_path / "out")
    assert verdict.verdict == "underpowered", verdict.reasons
    half, v2 = verdict.arms
    assert half.seed_values == {0: 3.0, 1: 3.0, 2: 3.0}
    assert v2.seed_values == {0: None, 1: None, 2: None}
    assert "3 of 3 runs of v2 and 0 of 3 of half diverged" in verdict.reasons[0]


def test_study_reports_gap_as_ratio_if_scale_is_logarithmic(tmp_path):
    rule = LOWER.replace("below: 0.0", "below: -0.01")
    verdict = judged(tmp_path, rule, BETTER, scale="log")
    assert verdict.verdict == "shown"
    mean = sum(math.log(a / b) for a, b in zip(BETTER, HALF, strict=True)) / 3
    assert verdict.tested[0].gap.mean == pytest.approx(mean)
    text = verdict_page(verdict).markdown()
    assert f"a ratio of {math.exp(mean):.3g} (" in text
    assert "log heldout_loss of v2 minus" in text


# Learning rates


def test_study_tunes_learning_rate_with_separate_seeds(tmp_path):
    study, out = study_file(tmp_path / "study.yaml", LOWER, lr=RATES, **TWO_ARMS), tmp_path / "out"
    names = [run.name for run in next_runs(study, out)]
    assert len(names) == 2 * 3
    assert names[0] == "rates/half-lr0.001-seed100"
    for arm in study.arms:
        write_rates(study, out, arm, {0.001: 5.0, 0.002: 4.9, 0.004: NAN})
    deciding = next_runs(study, out)
    assert [run.name for run in deciding[:3]] == ["half-seed0", "v2-seed0", "half-seed1"]
    assert all(run.lr == 0.002 and "optim.lr=0.002" in run.words for run in deciding)
    assert all("steps=10" not in run.words for run in deciding)


def chosen_rate(study, arm, out):
    return next(choice for choice in choose_rates(study, rate_runs(out)) if choice.arm == arm)


def test_learning_rate_grid_is_extended_if_best_rate_is_smallest_or_largest(tmp_path):
    study, out = study_file(tmp_path / "study.yaml", LOWER, lr=RATES), tmp_path / "out"
    write_rates(study, out, "v2", {0.001: 4.8, 0.002: 4.9, 0.004: 5.0})
    assert [run.lr for run in chosen_rate(study, "v2", out).remaining] == [0.0005]
    write_rates(study, out, "v2", {0.0005: 4.85})
    assert chosen_rate(study, "v2", out).lr == 0.001
    write_rates(study, out, "half", {0.001: 5.0, 0.002: 4.9, 0.004: 4.8, 0.008: 4.7})
    verdict = chosen_rate(study, "half", out)
    assert (verdict.lr, verdict.problem) == (0.008, "the best is the largest of the grid")
    write_rates(study, out, "standard", {0.001: NAN, 0.002: NAN, 0.004: NAN})
    assert chosen_rate(study, "standard", out).problem == "every learning rate diverged"


@pytest.mark.parametrize("change", ["config", "corpus"])
def test_verdict_is_not_comparable_if_run_of_grid_differs_from_study(tmp_path, change):
    study, out = study_file(tmp_path / "study.yaml", LOWER, lr=RATES, **TWO_ARMS), tmp_path / "out"
    for arm in study.arms:
        write_rates(study, out, arm, {0.001: 5.0, 0.002: 4.9, 0.004: 5.0})
    for run in next_runs(study, out):
        write_ended(study, run, out, (4.4 if run.arm == "half" else 4.3) + 0.01 * run.seed**2)
    assert judge(study, out).verdict != "not comparable"
    rate_run = out / "rates" / "v2-lr0.002-seed100"
    if change == "config":
        edit_text(rate_run / "config.yaml", "clip_norm: 1.0", "clip_norm: 2.0")
        difference = "optim.clip_norm is 2.0, not 1.0"
    else:
        edit_json(rate_run / "run.json", corpus="d1" * 32)
        difference = "corpus is d1d1d1d1"
    verdict = judge(study, out)
    assert verdict.verdict == "not comparable", verdict.reasons
    (reason,) = [text for text in verdict.reasons if text.startswith("learning rate of v2: ")]
    assert "rates/v2-lr0.002-seed100 is not the run of the study" in reason
    assert difference in reason
    file = tmp_path / "values.json"
    file.write_text(values_text(study, verdict.evidence), encoding="utf-8")
    assert judge_evidence(study, read_values(study, file)).reasons == verdict.reasons


def test_study_run_exits_1_if_arm_diverges_at_every_learning_rate(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")  # run_study sets it for its runs
    study = study_file(tmp_path / "study.yaml", LOWER, lr=RATES, **TWO_ARMS)
    out = tmp_path / "an out"
    write_rates(study, out, "v2", {0.001: NAN, 0.002: NAN, 0.004: NAN})
    write_rates(study, out, "half", {0.001: 5.0, 0.002: 4.9, 0.004: 5.0})
    assert {run.arm for run in next_runs(study, out)} == {"half"}, "the other arms still run"
    for run in next_runs(study, out):
        write_ended(study, run, out, 4.4)
    own = ["--config-dir", "my yamls", "plugins=[mine]"]
    status, _ = run_study(study, out, [], own)
    assert status == 1
    output = capsys.readouterr().out
    assert "arm v2 diverged at every learning rate (0.001, 0.002, 0.004)" in output
    own_words = "--config-dir 'my yamls' 'plugins=[mine]'"
    command = f"diffllm study verdict {study.path} 'out={out}' {own_words}"
    assert f"all other runs of {out} have ended: {command}" in output
    assert judge(study, out).verdict == "exploratory"


# Written pages


def test_markdown_and_html_and_json_contain_the_same_study_verdict(tmp_path, output_of, snapshot):
    verdict = judged(tmp_path, LOWER, BETTER, power="{gap: 0.05, sd: 0.01}")
    page = verdict_page(verdict)
    html, text = page.html(), page.markdown()
    assert text == snapshot
    assert html == verdict_page(verdict).html()
    assert "Gaps of the rules" in html
    title, _, sentence = text.splitlines()[:3]
    assert f"<title>{title.removeprefix('# ')}</title>" in html
    assert sentence in html
    words = ["study", "verdict", str(tmp_path / "study.yaml"), f"out={tmp_path / 'out'}"]
    numbers = json.loads(output_of(*words, "--json"))
    assert numbers["verdict"] == "shown"
    assert numbers["rules"][0]["gap"] == pytest.approx(-0.09967, abs=1e-4)
    out = output_of(*words)
    assert str(tmp_path / "out/verdict.html") in out
    assert (tmp_path / "out/verdict.md").read_text(encoding="utf-8") == text


def test_verdict_page_lists_parameters_and_tokens_of_each_arm(tmp_path, snapshot):
    arms = (
        "{standard: [attention=standard], half: [attention=standard_half_context], "
        "v2: [attention=diff_v2]}"
    )
    study = study_file(tmp_path / "study.yaml", LOWER, arms=arms)
    known = {"corpus": "a1" * 32, "environment": {"python": "3.12.1"}}
    sizes = {
        "standard": {"parameters": 10_000, "flops_per_token": 60_000},
        "half": {"parameters": 10_000, "flops_per_token": 60_000},
        "v2": {"parameters": 10_040, "flops_per_token": 66_000},
    }
    for arm, facts in sizes.items():
        write_arms(study, tmp_path / "out", {arm: HALF}, **facts, **known)
    verdict = judge(study, tmp_path / "out")
    assert verdict_page(verdict).markdown() == snapshot
    sizes["v2"]["parameters"] = 11_200
    for arm, facts in sizes.items():
        write_arms(study, tmp_path / "other", {arm: HALF}, **facts)
    larger = verdict_page(judge(study, tmp_path / "other")).markdown()
    assert ", v2 has 12% more parameters\n" in larger


def test_verdict_figure_shows_only_gap_of_first_rule_of_two_arms(tmp_path):
    also = f"[{ALIKE[:-1]}, alpha: 0.01}}]"
    verdict = judged(tmp_path, LOWER, BETTER, also=also)
    (gap,) = gaps_of_pairs(verdict).values()
    assert gap.interval == verdict.tested[0].bounds != verdict.tested[1].bounds


def test_lr_sensitivity_matches_hand_calculated_values():
    assert lr_sensitivity([4.4, 4.5, 4.9], 4096) == pytest.approx(0.2)
    initial = math.log(4096)
    assert lr_sensitivity([4.4, 20.0], 4096) == pytest.approx((initial - 4.4) / 2), "capped"
    assert lr_sensitivity([4.4, None], 4096) == pytest.approx((initial - 4.4) / 2), "diverged"
    assert lr_sensitivity([None, None], 4096) is None


@pytest.mark.slow
def test_study_rule_compares_lr_sensitivity_of_arms(tmp_path):
    sweep = {"lr_sweep": "[1e-3, 2e-3, 4e-3]", "metric": "lr_sensitivity"}
    study, out = study_file(tmp_path / "study.yaml", LOWER, **TWO_ARMS, **sweep), tmp_path / "out"
    assert len(next_runs(study, out)) == 2 * 3 * 3
    noise = {0: 0.0, 1: 0.01, 2: -0.02}
    worst = {"half": [4.4, 4.6, NAN], "v2": [4.39, 4.4, 4.5]}
    for run in [run for run in next_runs(study, out) if run.name != "v2-lr0.004-seed2"]:
        place = [1e-3, 2e-3, 4e-3].index(run.lr)
        write_ended(study, run, out, worst[run.arm][place] + noise[run.seed] * (place + 1))
    verdict = judge(study, out)
    assert (verdict.verdict, verdict.would_be) == ("exploratory", "shown")
    assert "v2-lr0.004-seed2" in verdict.reasons[0]
    assert list(verdict.arms[1].seed_values) == [0, 1], "a seed counts if all its rates have ended"

    (last,) = next_runs(study, out)
    write_ended(study, last, out, 4.44)
    verdict = judge(study, out)
    assert verdict.verdict == "shown", verdict.reasons
    half, v2 = verdict.numbers()["arms"].values()
    tiny = 2048
    expected = (4.41 + 4.62 + math.log(tiny)) / 3 - 4.41
    assert half["values"]["1"] == pytest.approx(expected)
    assert half["diverged"] == 3
    assert half["losses"]["half-lr0.004-seed0"] is None
    assert v2["values"]["0"] == pytest.approx(0.04)
    assert v2["lr"] is None
    assert "0.001 to 0.004" in verdict_page(verdict).markdown()
    json.dumps(verdict.numbers(), allow_nan=False)


def test_study_dry_run_estimates_time_from_pilot_runs(tmp_path, monkeypatch, output_of, snapshot):
    monkeypatch.chdir(tmp_path)
    study, out = study_file(Path("study.yaml"), LOWER, **TWO_ARMS), Path("out")
    pilot, words = tmp_path / "pilot", ("study", "run", study.path, f"out={out}", "--dry-run")
    assert output_of(*words) == snapshot(name="without pilot")
    assert not out.exists()

    write_arms(study, pilot, {"half": HALF})
    half, v2 = costs(study, out, [pilot])
    assert (half.seconds, half.hours) == pytest.approx((9, 3 * 9 / 3600))
    assert v2.seconds == pytest.approx(9 * v2.flops / half.flops)
    assert v2.flops > half.flops
    output = output_of(*words, f"pilot={pilot}")
    assert output == snapshot(name="with pilot")
    assert f"about 0:{3 * (9 + v2.seconds):02.0f} here" in output

    write_arms(study, out, {"v2": [4.3]})
    assert costs(study, out, [pilot])[1].seconds == pytest.approx(9)
    assert output_of(*words) == snapshot(name="one run finished")


def test_dry_run_estimates_time_from_gpu_and_mfu(
    tmp_path, monkeypatch, output_of, error_of, snapshot
):
    monkeypatch.chdir(tmp_path)
    study, out = study_file(Path("study.yaml"), LOWER, **TWO_ARMS), Path("out")
    words = ("study", "run", study.path, f"out={out}")
    output = output_of(*words, "--dry-run", "gpu=h100", "mfu=1e-6")
    arms = costs(study, out, [])
    seconds = sum(3 * (20 + arm.flops / 989.4e6) for arm in arms)
    assert f"about {clock(seconds)} on one H100, one run after another" in output
    assert output == snapshot
    error = error_of(*words, "--dry-run", "gpu=k80")
    assert "error: gpu=k80 is unknown; choose from GB200," in error
    error = error_of(*words, "gpu=h100")
    assert "error: gpu=h100 is only for estimates; add --dry-run" in error
    assert not out.exists()
    assert not (out / "sweep.json").exists()


def test_study_cost_estimate_depends_on_number_of_visible_keys(tmp_path):
    def study_with(name, *words):
        options = "".join(f", {word}" for word in words)
        arms = f"{{half: [attention=standard{options}], v2: [attention=diff_v2{options}]}}"
        return study_file(tmp_path / f"{name}.yaml", LOWER, arms=arms, baseline="half")

    def flops_of(study, out):
        return [arm.flops for arm in costs(study, out, [])]

    def expected(visible_keys):
        flops = []
        for cfg in map(load_run_config, runs):
            tokens = cfg.steps * cfg.global_batch_size * cfg.seq_len
            flops.append(tokens * totals(cfg.model, visible_keys)["flops"])
        return flops

    out, empty = tmp_path / "out", tmp_path / "empty"
    masked = "data.mask_documents=true"
    study = study_with("unstated", masked)
    write_arms(study, out, {"half": [4.4], "v2": [4.3]})
    runs = [out / "half-seed0", out / "v2-seed0"]
    assert flops_of(study, empty) == flops_of(study_with("whole"), empty) == expected(None)
    stated = study_with("stated", masked, "data.visible_keys=3")
    assert flops_of(stated, empty) == expected(3)
    for run in runs:
        edit_json(run / "summary.json", visible_keys=5.0)
    measured = costs(study, out, [])
    assert [arm.flops for arm in measured] == expected(5.0)
    assert sum(arm.seconds for arm in measured) == pytest.approx(2 * 9, rel=0.1)


WITH_REMOVED_RULES = {"damping_2": "margin=0.025 has no effect with kind=difference"}
"""Studies that began under older versions, with the reason why they cannot begin again."""
OURS = slow_but(["large_lr"], sorted(path.stem for path in STUDIES.glob("*.yaml")))


@pytest.mark.parametrize("name", OURS)
def test_every_study_file_of_repository_passes_start_checks(tmp_path, name):
    study = load_study(STUDIES / f"{name}.yaml")
    if name in WITH_REMOVED_RULES:
        with pytest.raises(ConfigError, match=WITH_REMOVED_RULES[name]):
            check_study_runs(study, tmp_path / "out", 1)
        current = [rule for rule in study.also if rule.kind != "trend"]
        rule, *also = (replace(rule, margin=None) for rule in (study.rule, *current))
        study = replace(study, rule=rule, also=also)
    check_study_runs(study, tmp_path / "out", 1)
    assert study.power or study.metric.startswith("tasks/")  # of these no spread was known before


def test_log_rank_rule_compares_arms_by_tokens_until_target_accuracy(tmp_path):
    seeds = str([*range(5)])
    study = study_file(tmp_path / "s.yaml", SOONER, **TWO_ARMS, metric="tasks/mqar", seeds=seeds)
    out = tmp_path / "out"
    write_arms(study, out, dict.fromkeys(study.arms, [4.4] * 5))
    target_steps = {"v2": [5, 5, 10, 5, 5], "half": [15, 20, None, 20, None]}
    for arm, step_by_seed in target_steps.items():
        for seed, target_step in enumerate(step_by_seed):
            lines = []
            for step in (5, 10, 15, 20):
                accuracy = 0.95 if step == target_step else 0.2
                lines.append({"step": step, "tokens": 256 * step, "tasks/mqar": accuracy})
            write_lines(out / f"{arm}-seed{seed}", lines)
    verdict = judge(study, out)
    assert verdict.verdict == "shown", verdict.reasons
    assert "5 of 5 runs of v2 reach it, half of them by 1.28k tokens" in verdict.reasons[0]
    numbers = json.loads(json.dumps(verdict.numbers(), allow_nan=False))
    assert numbers["rules"][0]["reaches"] == 0.9
    assert numbers["rules"][0]["gap"] is None
    assert "Gaps of the rules" not in verdict_page(verdict).html()


def test_log_rank_rule_is_underpowered_if_an_arm_has_no_runs(tmp_path):
    study = study_file(tmp_path / "s.yaml", SOONER, **TWO_ARMS, metric="tasks/mqar")
    out = tmp_path / "out"
    write_arms(study, out, {"v2": [4.4]})
    line = {"step": 20, "tokens": 5120, "tasks/mqar": 0.95}
    write_lines(out / "v2-seed0", [line])
    verdict = judge(study, out)
    assert (verdict.verdict, verdict.would_be) == ("exploratory", "underpowered")
    assert "0 of 0 runs of half reach it" in verdict.reasons[-1]


@pytest.mark.slow
def test_judge_function_composes_config_only_once_per_arm(tmp_path, monkeypatch):
    counts = []
    for seeds in (4, 40):
        place = tmp_path / str(seeds)
        place.mkdir()
        study = study_file(place / "study.yaml", LOWER, **TWO_ARMS, seeds=str([*range(seeds)]))
        losses = [4.4 + seed / 1e3 for seed in range(seeds)]
        write_arms(study, place / "out", {"half": losses, "v2": losses})
        planned_runs.solved_config.cache_clear()
        saved.PARSED.clear()
        calls = {"solved": 0, "parsed": 0, "opened": 0}

        def counted(name, function, calls=calls):
            def call(*args, **kwargs):
                calls[name] += 1
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(planned_runs, "solved", counted("solved", planned_runs.solved))
            patch.setattr(saved, "parse_yaml", counted("parsed", saved.parse_yaml))
            patch.setattr(os, "open", counted("opened", os.open))
            judge(study, place / "out")
        counts.append(calls)
    assert counts[1]["solved"] == counts[0]["solved"] == 2, "one per arm"
    assert counts[1]["parsed"] == counts[0]["parsed"] == 2, "one per arm"
    assert counts[1]["opened"] <= 7 * 80 + 10, "config, facts, metrics, changes, summary thrice"
