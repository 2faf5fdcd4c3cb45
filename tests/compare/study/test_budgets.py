"""Gaps of a study at equal tokens, parameters and training FLOPs."""

import json
import math

import numpy as np
import pytest
from runs.written import study_file, write_arms

from diffllm.compare.report.runs import Series
from diffllm.compare.study import verdict_page
from diffllm.compare.study.arms import StudyArm, StudyRun
from diffllm.compare.study.decision import apply_rules
from diffllm.compare.study.verdict import judge
from diffllm.compare.study.verdict_page import markdown, verdict_html
from diffllm.core.errors import ConfigError
from diffllm.metrics.facts import RunFacts

ARMS = {
    "arms": "{half: [attention=standard_half_context], v2: [attention=diff_v2]}",
    "baseline": "half",
}
LOWER = "{kind: difference, arm: v2, against: half, below: 0.0, at: tokens}"
HALF = [4.400, 4.411, 4.390]
V2 = [loss + change for loss, change in zip(HALF, (-0.005, -0.0051, -0.0049), strict=True)]
SLOPE = 0.1
TOKENS = 20 * 8 * 32
SIZES = {"half": (10_000, 60_000.0), "v2": (10_040, 66_000.0)}


def judged(tmp_path, rule=LOWER, sizes=SIZES, half=HALF, **more):
    """Judge runs whose loss falls linearly in the logarithm of tokens to a known last value."""
    study, out = study_file(tmp_path / "study.yaml", rule, **ARMS, **more), tmp_path / "out"
    for arm, losses in {"half": half, "v2": V2}.items():
        parameters, flops = sizes[arm]
        write_arms(study, out, {arm: losses}, parameters=parameters, flops_per_token=flops)
        for seed, loss in enumerate(losses):
            lines = [
                {
                    "step": step,
                    "tokens": 256 * step,
                    "eval/loss": loss - SLOPE * math.log(256 * step / TOKENS),
                }
                for step in (2, 5, 10, 20)
                if math.isfinite(loss)
            ]
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (out / f"{arm}-seed{seed}" / "metrics.jsonl").write_text(text, encoding="utf-8")
    return judge(study, out)


@pytest.mark.parametrize("test", ["paired", "welch"])
def test_study_gap_at_equal_flops_is_interpolated_from_loss_curves(tmp_path, test):
    found = judged(tmp_path, test=test)
    (equal,) = json.loads(json.dumps(found.numbers()["equal"], allow_nan=False))
    at_flops = -0.005 + SLOPE * math.log(1.1)  # V2 has fewer tokens at equal FLOPs
    assert equal["at_tokens"]["mean"] == pytest.approx(-0.005)
    assert equal["at_parameters"] == equal["at_tokens"]
    assert equal["at_flops"]["mean"] == pytest.approx(at_flops, abs=1e-9)
    assert equal["at_flops"]["low"] < at_flops < equal["at_flops"]["high"]
    assert equal["flops"] == TOKENS * 60_000
    assert equal["interpolation_error"] == pytest.approx(0, abs=1e-9)
    if test == "paired":
        row = (
            "| v2 − half | −0.0050 (−0.0052 to −0.0048) | −0.0050 (−0.0052 to −0.0048) | +0.0045 ("
        )
        assert row.replace("−0", "-0") in markdown(found).replace("−0", "-0")
        assert "Equal tokens, parameters and FLOPs" in verdict_html(found)


def test_study_rule_uses_gap_at_equal_flops_if_at_key_is_flops(tmp_path):
    (tmp_path / "flops").mkdir()
    assert judged(tmp_path).verdict == "shown"
    found = judged(tmp_path / "flops", LOWER.replace("at: tokens", "at: flops"))
    assert found.verdict == "refuted", found.reasons
    assert "heldout_loss at equal training FLOPs of v2 minus that of half" in markdown(found)
    assert found.tested[0].gap.mean == pytest.approx(-0.005 + SLOPE * math.log(1.1))


def test_verdict_figure_shows_only_gap_of_first_rule(tmp_path, monkeypatch):
    drawn, draw = {}, verdict_page.draw_gaps_of_arms

    def recorded(gaps, *others):
        drawn.update(gaps)
        return draw(gaps, *others)

    monkeypatch.setattr(verdict_page, "draw_gaps_of_arms", recorded)
    found = judged(tmp_path, also=f"[{LOWER.replace('at: tokens', 'at: flops')}]")
    verdict_html(found)
    assert drawn["v2", "half"].mean == found.tested[0].gap.mean != found.tested[1].gap.mean


def test_gap_at_equal_flops_excludes_seed_with_diverged_run(tmp_path):
    rule = LOWER.replace("at: tokens", "at: flops").replace("below: 0.0", "below: 0.1")
    found = judged(tmp_path, rule, half=[*HALF[:2], math.nan])
    assert found.tested[0].outcome.base.diverged == 1
    assert found.tested[0].gap.seeds == 2


def test_apply_rules_raises_error_for_zero_metric_on_log_scale(tmp_path):
    arms = {}
    for name, tokens, values in (("v2", [100, 200], [0.0, 0.5]), ("half", [100], [0.1])):
        curve = Series(np.array(tokens), np.array(values))
        facts = RunFacts(flops_per_token=10.0)
        run = StudyRun(name, 0, 1e-3, 4.0, 0.5, 200, 4096, curve, facts=facts)
        arms[name] = StudyArm(name, None, [run], {0: math.log(0.5)})
    rule = LOWER.replace("at: tokens", "at: flops")
    more = {"metric": "tasks/mqar", "scale": "log"}
    with pytest.raises(ConfigError, match="v2: tasks/mqar=0 must be above 0 with scale=log"):
        apply_rules(study_file(tmp_path / "study.yaml", rule, **ARMS, **more), arms)


def test_gap_at_equal_parameters_is_not_measured_if_arm_sizes_differ(tmp_path):
    found = judged(tmp_path, sizes={**SIZES, "v2": (11_200, 66_000.0)})
    assert found.equal[0].parameters == "not measured: v2 has 12% more parameters"
    assert "| not measured: v2 has 12% more parameters |" in markdown(found)


def test_verdict_has_no_gap_at_equal_flops_if_training_flops_are_unknown(
    tmp_path,
):
    sizes = {**SIZES, "v2": (10_040, None)}
    found = judged(tmp_path, sizes=sizes, unequal="[flops]")
    missing = "v2-seed0 has no curve of heldout_loss over known training FLOPs"
    assert found.equal[0].flops == f"not measured: {missing}"
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match=f"cannot compare v2 with half at equal FLOPs: {missing}"):
        judged(tmp_path / "b", LOWER.replace("at: tokens", "at: flops"), sizes, unequal="[flops]")


@pytest.mark.parametrize(
    ("rule", "metric", "said"),
    [
        (LOWER.replace("at: tokens", "at: time"), "heldout_loss", "rule.at=time is not one of"),
        (
            LOWER.replace("at: tokens", "at: flops"),
            "train_loss",
            "at=flops is not supported with metric=train_loss; use heldout_loss or a metric that",
        ),
        (
            "{kind: log_rank, arm: v2, against: half, reaches: 0.9, at: flops}",
            "tasks/mqar",
            "rule.at=flops is not supported with kind=log_rank",
        ),
    ],
)
def test_load_study_raises_error_if_at_key_is_invalid_for_rule(tmp_path, rule, metric, said):
    with pytest.raises(ConfigError, match=said):
        study_file(tmp_path / "study.yaml", rule, metric=metric)
