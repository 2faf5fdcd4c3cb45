"""Gaps of a study at equal tokens and parameters."""

import json
import math

import pytest
from runs.written import study_file, write_arms

from diffllm.compare.study.verdict import judge
from diffllm.compare.study.verdict_page import gaps_of_pairs, verdict_page

ARMS = {
    "arms": "{half: [attention=standard_half_context], v2: [attention=diff_v2]}",
    "baseline": "half",
}
LOWER = "{kind: difference, arm: v2, against: half, below: 0.0}"
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


def test_study_gap_at_equal_parameters_equals_gap_at_equal_tokens(tmp_path):
    found = judged(tmp_path)
    (equal,) = json.loads(json.dumps(found.numbers()["equal"], allow_nan=False))
    assert equal["at_tokens"]["mean"] == pytest.approx(-0.005)
    assert equal["at_parameters"] == equal["at_tokens"]
    row = "| v2 − half | −0.0050 (−0.0052 to −0.0048) | −0.0050 (−0.0052 to −0.0048) |"
    assert row.replace("−0", "-0") in verdict_page(found).markdown().replace("−0", "-0")


def test_verdict_figure_shows_only_gap_of_first_rule(tmp_path):
    found = judged(
        tmp_path, also="[{kind: equivalence, arm: v2, against: half, margin: 0.1, alpha: 0.01}]"
    )
    (gap,) = gaps_of_pairs(found).values()
    assert gap.interval == found.tested[0].bounds != found.tested[1].bounds


def test_gap_at_equal_parameters_is_not_measured_if_arm_sizes_differ(tmp_path):
    found = judged(tmp_path, sizes={**SIZES, "v2": (11_200, 66_000.0)})
    assert found.equal[0].parameters == "not measured: v2 has 12% more parameters"
    assert "| not measured: v2 has 12% more parameters |" in verdict_page(found).markdown()
