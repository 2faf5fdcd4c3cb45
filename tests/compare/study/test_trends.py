"""Trends over parameters, the trend of the loss gap in training, and losses by position."""

import math
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from runs.written import LOWER, edit_text, study_file, write_arms, write_lines

from diffllm.compare.study.arms import StudyArm, StudyRun
from diffllm.compare.study.decision import apply_rules
from diffllm.compare.study.file import load_study
from diffllm.compare.study.running import check_study_runs
from diffllm.compare.study.verdict import judge
from diffllm.compare.study.verdict_page import trend_text, verdict_page
from diffllm.core.errors import ConfigError
from diffllm.core.run_facts import RunFacts
from diffllm.evaluation.evaluation import results_of, store_result
from diffllm.evaluation.position import Position

TREND = "{kind: trend, over: tokens, arm: v2, against: half, below: 0.0}"


SIZES = (
    "{kind: trend, over: parameters, arm: v2_l, against: std_l, "
    "smaller: {v2_s: std_s, v2_m: std_m}, below: 0.0}"
)
NOISE = np.array([0.0, 0.001, -0.001, 0.002, -0.002])
SIX = {
    "arms": "{" + ", ".join(
        f"{arm}_{size}: [attention={variant}, model.dim={dim}]"
        for arm, variant in (("std", "standard"), ("v2", "diff_v2"))
        for size, dim in (("s", 32), ("m", 64), ("l", 128))
    ) + "}",
    "baseline": "std_l",
}  # fmt: skip


# Parameters


def sized(tmp_path, gaps, parameters=(1e6, 2e6, 4e6), missing=(), rule=SIZES, diverged=()):
    """Six arms; v2 minus standard is `gaps` by size, and a NOISE of the size per seed."""
    study = study_file(tmp_path / "study.yaml", rule, seeds="[0, 1, 2, 3, 4]", **SIX)
    arms = {}
    for place, (size, count) in enumerate(zip("sml", parameters, strict=True)):
        for name, gap in ((f"std_{size}", 0.0), (f"v2_{size}", gaps[place])):
            runs, values = [], {}
            for seed in range(5):
                value = 5 - place + gap + place * NOISE[seed] * bool(gap)
                if (name, seed) in diverged:
                    value = None
                run = StudyRun(f"{name}-{seed}", name, seed, 1e-3, value, value, 1000, 2048)
                run = replace(run, facts=RunFacts(parameters=count))
                if (name, seed) not in missing:
                    runs.append(run)
                    values[seed] = value
            arms[name] = StudyArm(name, values, runs=runs)
    return apply_rules(study, arms)[0]


def test_trend_over_parameters_equals_loss_gap_change_per_doubling(tmp_path):
    found = sized(tmp_path, (-0.01, -0.03, -0.05))
    assert found.gap.mean == pytest.approx(-0.02)
    assert found.gap.error == pytest.approx(np.std(NOISE, ddof=1) / math.sqrt(5))
    assert found.verdict == "shown"
    assert "v2_l minus std_l changes by -0.02 nats per token per doubling of param" in found.reason
    found = sized(tmp_path, (-0.01, -0.03, -0.05), missing=[("std_m", 1)])
    assert found.gap.seeds == 4, "a seed counts if all sizes have ended"
    every = [("v2_s", seed) for seed in range(5)]
    assert sized(tmp_path, (-0.01, -0.03, -0.05), missing=every).verdict == "underpowered"


@pytest.mark.parametrize(
    ("bound", "slope", "verdict"),
    [
        ("below: 0.0", -0.01, "shown"),
        ("below: 0.0", 0.01, "refuted"),
        ("below: 0.0", 1e-5, "underpowered"),
        ("below: -0.02", -0.01, "refuted"),
        ("above: 0.0", 0.01, "shown"),
        ("above: 0.0", -0.01, "refuted"),
    ],
)
def test_trend_rule_verdict_depends_on_slope_of_loss_gap(tmp_path, bound, slope, verdict):
    rule = SIZES.replace("below: 0.0", bound)
    found = sized(tmp_path, (slope, 2 * slope, 3 * slope), rule=rule)
    assert found.verdict == verdict, found.reason


def test_trend_rule_is_underpowered_if_arms_have_unequal_divergence(tmp_path):
    gaps = (-0.01, -0.03, -0.05)
    every = [("v2_m", seed) for seed in range(5)]
    for diverged in ([("v2_m", 4)], [("std_s", 4)], every):
        assert sized(tmp_path, gaps, diverged=diverged).verdict == "underpowered", diverged
    both = sized(tmp_path, gaps, diverged=[("v2_m", 4), ("std_s", 4)])
    assert (both.verdict, both.gap.seeds) == ("shown", 4)


@pytest.mark.parametrize("parameters", [(1e6, 1e6, 4e6), (1e6, 5e6, 4e6)])
def test_trend_over_parameters_raises_error_if_model_sizes_are_invalid(tmp_path, parameters):
    message = r"different numbers of parameters \(.* must be in the largest pair"
    with pytest.raises(ConfigError, match=message):
        sized(tmp_path, (0.0, 0.0, 0.0), parameters)


# Before runs start


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("over: tokens, ", "", "must set below with over, or above with over, but sets"),
        ("over: tokens", "over: time", "rule.over=time must be one of tokens"),
        ("kind: trend", "kind: difference", "kind=difference must set below, or"),
        (
            "below: 0.0",
            "margin: 0.1",
            "rule: kind=trend must set below with over, or above with over, but",
        ),
        ("over: tokens", "over: parameters", "over=parameters needs at least 3 model sizes, but"),
        ("below", "smaller: {half: v2}, below", "rule.smaller is allowed only with over=parame"),
    ],
)
def test_error_for_invalid_trend_rule_mentions_the_key(tmp_path, old, new, said):
    with pytest.raises(ConfigError) as caught:
        study_file(tmp_path / "study.yaml", TREND.replace(old, new))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("v2_s: std_s", "v2_x: std_s", "rule.smaller=v2_x is not one of the arms"),
        ("v2_s: std_s", "v2_s: v2_s", "v2_s cannot be compared with itself"),
        ("v2_s: std_s", "v2_s: std_l", "std_l, std_m, std_l contains an arm twice"),
    ],
)
def test_error_for_invalid_smaller_arms_of_trend_rule_mentions_an_arm(tmp_path, old, new, said):
    with pytest.raises(ConfigError) as caught:
        study_file(tmp_path / "study.yaml", SIZES.replace(old, new), **SIX)
    assert said in str(caught.value)


def test_check_study_runs_raises_error_if_sizes_do_not_fit_trend_rule(tmp_path):
    study = study_file(tmp_path / "study.yaml", SIZES, **SIX)
    check_study_runs(study, tmp_path / "out", 1)
    edit_text(study.path, "dim=32", "dim=256")
    with pytest.raises(ConfigError, match=r"different numbers of parameters \(v2_s "):
        check_study_runs(load_study(study.path), tmp_path / "out", 1)


TWICE = "v2_l: [attention=diff_v2, model.dim=128"


def test_trend_over_parameters_requires_equal_conditions_in_all_arms(tmp_path):
    arms = SIX["arms"].replace(TWICE, f"{TWICE}, steps=40, eval.interval=20")
    keys = {**SIX, "arms": arms, "unequal": "[parameters, flops, tokens, eval.interval]"}
    study, out = study_file(tmp_path / "study.yaml", SIZES, **keys), tmp_path / "out"
    said = r"trend over parameters: arms differ in .*tokens: 5,120 in .*; 10,240 in v2_l, but the"
    with pytest.raises(ConfigError, match=said):
        check_study_runs(study, out, 1)
    for place, (size, gap) in enumerate(zip("sml", (-0.01, -0.03, -0.05), strict=True)):
        for name, change in ((f"std_{size}", 0.0), (f"v2_{size}", gap)):
            losses = [5 - place + change * (1 + noise) for noise in 10 * NOISE[:3]]
            write_arms(study, out, {name: losses}, parameters=10_000 * 4**place)
    found = judge(study, out)
    assert found.tested[0].verdict == "shown"
    assert found.verdict == "not comparable"
    assert re.match(said, found.reasons[0])


def test_trend_of_times_requires_equal_speed_keys_in_all_arms(tmp_path):
    arms = SIX["arms"].replace(TWICE, f"{TWICE}, micro_batch_size=2")
    keys = {**SIX, "arms": arms, "unequal": "[parameters, flops, micro_batch_size]"}
    check_study_runs(study_file(tmp_path / "loss.yaml", SIZES, **keys), tmp_path / "a", 1)
    study = study_file(tmp_path / "speed.yaml", SIZES, metric="tokens_per_s", **keys)
    with pytest.raises(ConfigError, match="trend over parameters: arms differ in micro_batch_size"):
        check_study_runs(study, tmp_path / "b", 1)


# From runs on disk


def shrinking_gap_study(tmp_path, rule, **more):
    """Runs whose gap starts at -0.04 and shrinks by 0.01 per doubling from step 5 on."""
    study = study_file(tmp_path / "study.yaml", rule, seeds="[0, 1, 2, 3, 4]", **more)
    losses = {"standard": [4.0] * 5, "half": [4.0] * 5, "v2": [3.98] * 5}
    write_arms(study, tmp_path / "out", losses)
    for name in losses:
        for seed, noise in enumerate(NOISE):
            gaps = {step: -0.04 + (0.01 + noise) * math.log2(step / 5) for step in (5, 10, 15, 20)}
            lines = [
                {
                    "step": step, "tokens": 256 * step, "train/loss": 4.0,
                    "eval/loss": 4 + (name == "v2") * gap,
                }
                for step, gap in gaps.items()
            ]  # fmt: skip
            write_lines(tmp_path / "out" / f"{name}-seed{seed}", lines)
    return study


def test_verdict_page_describes_trend_of_loss_gap_at_equal_tokens(tmp_path):
    found = judge(shrinking_gap_study(tmp_path, LOWER), tmp_path / "out")
    half = 2.776445 * np.std(NOISE, ddof=1) / math.sqrt(5)
    said = (
        "The gap of v2 to half shrinks: +0.010 nats per token per doubling of tokens (95% interval "
        f"{0.01 - half:+.3f} to {0.01 + half:+.3f}, 5 seeds), from -0.040 to -0.020 on a line "
        "through 4 evaluations from 1.28k to 5.12k tokens."
    )
    assert verdict_page(found).markdown().count(said) == 1
    arms = {arm.label: arm for arm in found.arms}
    assert trend_text(study_file(tmp_path / "b.yaml", LOWER, metric="train_loss"), arms) == ""
    # Equal FLOPs or seconds mean that learning rates differ after equal tokens.
    longer = [replace(run, planned_tokens=2 * run.planned_tokens) for run in arms["half"].runs]
    arms["half"] = replace(arms["half"], runs=longer)
    assert trend_text(found.study, arms) == ""


def test_metric_by_position_is_read_from_evaluation_of_last_step(tmp_path):
    study, out = shrinking_gap_study(tmp_path, LOWER, metric="position/4"), tmp_path / "out"
    for name in ("standard", "half", "v2"):
        for seed, noise in enumerate(NOISE):
            slope = (name == "v2") * (-0.01 + noise)
            bins = {"0": [9.0, 1]} | {
                word: [100 * (4 + slope * i), 100]
                for i, word in enumerate(("1", "2-3", "4-7", "8-15"))
            }
            lines = [{"all": {"": [1.0, 1]}, "position": bins, "distance": {}, "span": {}}]
            scores = [asdict(score) for score in Position().scores({}, lines)]
            scores = [{**score, **score.pop("more")} for score in scores]
            if (name, seed) == ("v2", 4):
                run = out / "v2-seed4"
                with pytest.raises(ConfigError) as caught:
                    judge(study, out)
                said = f"{run} has no results of the task position at the last step; run: diffllm"
                assert said in str(caught.value)
                assert f"diffllm evaluate run={run} 'tasks=[position]'" in str(caught.value)
            file = results_of(out / f"{name}-seed{seed}", 20) / "position.jsonl"
            key = {"documents": 200, "checkpoint": f"{name}{seed}"}
            first = {"key": key, "unit": "nats a token"}
            store_result(file, {**first, "scores": scores}, lines)
    found = judge(study, out)
    assert found.verdict == "shown", found.reasons
    assert found.tested[0].gap.mean == pytest.approx(-0.02)
    assert study.unit == "nats per token"
    for settings in ({"documents": 200, "seq_len": 64}, {"documents": 50}):
        store_result(file, {**first, "key": settings, "scores": scores}, lines)
        found = judge(study, out)
        assert found.verdict == "not comparable"
        assert "a run was evaluated with limit=N or seq_len=N; repeat" in found.reasons[0]
        assert "runs were evaluated on different documents" in found.reasons[1]


def test_metric_by_position_needs_documents_of_this_length(tmp_path):
    study, out = shrinking_gap_study(tmp_path, LOWER, metric="position/64"), tmp_path / "out"
    for name in ("standard", "half", "v2"):
        for seed in range(5):
            file = results_of(out / f"{name}-seed{seed}", 20) / "position.jsonl"
            score = {"of": "position 1", "value": 4.0, "level": {"position": 1}}
            store_result(file, {"key": {}, "unit": "nats per token", "scores": [score]}, [])
    with pytest.raises(ConfigError, match="has no held-out document with more than 64 tokens"):
        judge(study, out)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("position/3000", "metric=position/3000 must be position/N, with N a power of 2"),
        ("position/x", "metric=position/x must be position/N"),
    ],
)
def test_metric_by_position_must_name_an_octave(tmp_path, metric, said):
    with pytest.raises(ConfigError, match=said):
        study_file(tmp_path / "study.yaml", LOWER, metric=metric)
