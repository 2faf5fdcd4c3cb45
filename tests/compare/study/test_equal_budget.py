"""Studies whose arms train with equal FLOPs or equal seconds."""

import math
import re
from dataclasses import asdict, replace

import pytest
from runs.json_files import write_json
from runs.written import config_of, edit_text, study_file, write_ended, write_train_seconds

from diffllm.cli import main
from diffllm.compare.study.costs import costs
from diffllm.compare.study.file import load_study
from diffllm.compare.study.planned_runs import (
    config_of_planned,
    deciding_runs,
    rate_run,
    steps_of_arm,
)
from diffllm.compare.study.raw_values import read_values
from diffllm.compare.study.running import check_study_runs
from diffllm.compare.study.verdict import judge, judge_evidence
from diffllm.compare.study.verdict_page import verdict_page, write_verdict
from diffllm.compare.timing_profile import PROFILE_FORMAT, ArmTiming, TimingProfile, time_settings
from diffllm.config.matching import totals
from diffllm.core.errors import ConfigError
from diffllm.core.run_facts import RunFacts

ARMS = {
    "base": "[model=tiny, steps=100, seq_len=32, global_batch_size=8]",
    "arms": "{standard: [attention=standard], v2: [attention=diff_v2]}",
    "unequal": "[parameters]",
}
LOWER = "{kind: difference, arm: v2, against: standard, below: 0.0}"
SECONDS = {
    **ARMS,
    "base": "[model=tiny, seq_len=32, global_batch_size=8]",
    "budget": "{seconds: 6, profile: timing.json}",
}
STEP_SECONDS = {"standard": 0.1, "v2": 0.13}
MACHINE = {"device": "GPU", "ranks": 1, "compute_dtype": "float32", "compiled": False}


def write_profile(path, step_seconds=STEP_SECONDS, **settings):
    arms = {}
    for arm, seconds in step_seconds.items():
        variant = {"standard": "standard", "v2": "diff_v2"}[arm]
        words = ("model=tiny", "seq_len=32", "global_batch_size=8", f"attention={variant}")
        timed = {**time_settings(config_of(words)), **settings}
        facts = RunFacts(**MACHINE, torch="2.13.0")
        arms[arm] = ArmTiming(variant, [*words], timed, facts, 256, [[seconds], [1.02 * seconds]])
    profile = TimingProfile(PROFILE_FORMAT, "2026-11-28", 2, 5, 25, arms)
    write_json(path, asdict(profile))


def seconds_study(tmp_path, **more):
    write_profile(tmp_path / "timing.json")
    return study_file(tmp_path / "study.yaml", LOWER, **{**SECONDS, **more})


def write_runs(study, out, loss_of, flops_factor=1.0, seconds_factor=1.0, **facts):
    """Write the runs of a study: `loss_of(flops, arm, seed)` is the final held-out loss.

    The factors multiply the measured costs of v2.
    """
    factors = {"standard": (1.0, 1.0), "v2": (flops_factor, seconds_factor)}
    for arm in study.arms:
        arm_flops_factor, arm_seconds_factor = factors[arm]
        for seed in study.seeds:
            (planned,) = deciding_runs(study, arm, seed, None)
            cfg = config_of_planned(planned)
            flops_per_token = totals(cfg.model)["flops"]
            loss = loss_of(cfg.steps * 256 * flops_per_token, arm, seed)
            measured = {"flops_per_token": flops_per_token * arm_flops_factor, **facts}
            path = write_ended(study, planned, out, loss, **measured)
            write_train_seconds(path, [STEP_SECONDS[arm] * arm_seconds_factor] * cfg.steps)


def flops_study(tmp_path):
    return study_file(tmp_path / "study.yaml", LOWER, **ARMS, budget="flops")


def better_v2(flops, arm, seed):
    return (4.3 if arm == "v2" else 4.4) + 0.001 * seed**2 + 0.0005 * (arm == "v2") * seed


def budget_verdict(study, loss_of=better_v2, **costs):
    """Write the runs of a study in a directory with the name of the study, and judge them."""
    out = study.path.with_suffix("")
    write_runs(study, out, loss_of, **costs)
    return judge(study, out)


def one_curve(flops, arm, seed):
    """Loss of fully annealed runs as a function of FLOPs alone, with noise of seeds."""
    noise = {"standard": (0.001, -0.002, 0.001), "v2": (0.002, -0.001, -0.001)}
    return 4.4 - 0.5 * math.log(flops / 1e11) + noise[arm][seed]


def test_steps_at_equal_flops_follow_from_equations_of_the_model(tmp_path):
    study = flops_study(tmp_path)
    # Per token and layer: matrices (q, k, v, o, and lambda in V2), attention over 16.5 keys on
    # average, and the feed-forward network. The output matrix has 2,048 x 128 entries.
    ffn, output = 3 * 128 * 384, 2048 * 128
    standard = 2 * (128 * (128 + 64 + 64 + 128) + 4 * (32 + 32) * 16.5 + ffn) + output
    v2 = 2 * (128 * (256 + 64 + 64 + 128) + 128 * 4 + 8 * (32 + 32) * 16.5 + ffn) + output
    assert steps_of_arm(study, "standard") == 100
    assert steps_of_arm(study, "v2") == round(100 * standard / v2) == 94
    configs = [config_of_planned(deciding_runs(study, arm, 0, None)[0]) for arm in study.arms]
    assert [cfg.steps for cfg in configs] == [100, 94]
    assert [cfg.optim.warmup_steps for cfg in configs] == [10, 10]  # ceil(94 / 10)
    assert [cfg.eval.interval for cfg in configs] == [25, 24]
    check_study_runs(study, tmp_path / "out", 1)


def test_steps_at_equal_seconds_follow_from_step_times_of_the_profile(tmp_path):
    lr = "{grid: [1e-3, 2e-3, 4e-3], seeds: [100], steps: 26}"
    study = seconds_study(tmp_path, lr=lr)
    assert [steps_of_arm(study, arm) for arm in study.arms] == [60, 46]  # 6 / 0.13 = 46.15
    runs = [rate_run(study, arm, 100, 1e-3) for arm in study.arms]
    assert [config_of_planned(run).steps for run in runs] == [26, 20]
    check_study_runs(study, tmp_path / "out", 1)
    rates, deciding = costs(study, tmp_path / "out", [])[:2]
    assert (rates.seconds, deciding.seconds) == pytest.approx((2.6, 6.0))


def test_arms_must_agree_in_warmup_that_does_not_follow_steps(tmp_path):
    arms = "{standard: [attention=standard], v2: [attention=diff_v2, optim.warmup_steps=5]}"
    study = study_file(tmp_path / "study.yaml", LOWER, **{**ARMS, "arms": arms}, budget="flops")
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps: 10 in standard; 5 in v2"):
        check_study_runs(study, tmp_path / "out", 1)


def test_arms_with_one_loss_curve_over_flops_are_different_only_at_equal_tokens(tmp_path):
    verdicts = {}
    for budget in ("flops", "tokens"):
        more = {**ARMS, "unequal": "[parameters, flops]", "budget": budget}
        study = study_file(tmp_path / f"{budget}.yaml", LOWER, **more)
        verdicts[budget] = budget_verdict(study, one_curve)
    assert verdicts["tokens"].verdict == "shown", verdicts["tokens"].reasons
    assert verdicts["flops"].verdict == "underpowered", verdicts["flops"].reasons
    (gap,) = [tested.gap.mean for tested in verdicts["flops"].tested]
    assert abs(gap) < 0.001  # rounding to whole steps


@pytest.mark.parametrize(("factor", "expected"), [(1.02, "shown"), (1.05, "not comparable")])
def test_measured_flops_of_arms_must_agree(tmp_path, factor, expected):
    verdict = budget_verdict(flops_study(tmp_path), flops_factor=factor)
    assert verdict.verdict == expected, verdict.reasons
    if expected == "not comparable":
        assert verdict.reasons == [
            "budget: measured training FLOPs per run differ by 5%, more than 3%: "
            "102B in standard; 107B in v2"
        ]


def test_verdict_pages_and_values_contain_budget_and_costs(tmp_path):
    study = flops_study(tmp_path)
    verdict = budget_verdict(study)
    assert verdict.verdict == "shown", verdict.reasons
    write_verdict(verdict, tmp_path)
    recomputed = judge_evidence(study, read_values(study, tmp_path / "values.json"))
    assert recomputed.numbers() == verdict.numbers()
    v2 = verdict.numbers()["budget"]["arms"][1]
    assert (v2["arm"], v2["steps"], v2["tokens"]) == ("v2", 94, 94 * 256)
    assert v2["measured"] == pytest.approx(v2["planned"])
    assert "Budget: the training FLOPs of the runs of standard." in verdict_page(verdict).markdown()


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "shown"), (1.06, "not comparable")])
def test_step_times_on_machine_of_the_profile_must_agree(tmp_path, snapshot, factor, expected):
    verdict = budget_verdict(seconds_study(tmp_path), seconds_factor=factor, **MACHINE)
    assert verdict.verdict == expected, verdict.reasons
    assert verdict_page(verdict).markdown() == snapshot


def test_profile_decides_if_runs_used_another_machine(tmp_path):
    facts = {**MACHINE, "device": "CPU"}
    verdict = budget_verdict(seconds_study(tmp_path), seconds_factor=2, **facts)
    assert verdict.verdict == "shown", verdict.reasons
    text = verdict_page(verdict).markdown()
    assert "used another machine (device CPU, not GPU). The machine of the profile decides" in text


def test_seed_on_another_machine_does_not_end_the_check_of_other_seeds(tmp_path):
    study = seconds_study(tmp_path)
    budget_verdict(study, seconds_factor=1.2, **MACHINE)
    for file in tmp_path.glob("study/*-seed0/run.json"):
        edit_text(file, "2.13.0", "2.13.1")
    verdict = judge(study, tmp_path / "study")
    assert verdict.verdict == "not comparable", verdict.reasons
    assert "measured seconds of training steps per run differ by 20%" in verdict.reasons[0]
    text = verdict_page(verdict).markdown()
    assert "2 of 6 runs used another machine (torch 2.13.1, not 2.13.0)" in text


def test_study_is_exploratory_if_its_profile_changed_after_the_runs(tmp_path):
    study = seconds_study(tmp_path)
    assert budget_verdict(study, **MACHINE).verdict == "shown"
    write_profile(tmp_path / "timing.json", {"standard": 0.1, "v2": 0.12})
    verdict = judge(load_study(study.path), tmp_path / "study")
    assert (verdict.verdict, verdict.would_be) == ("exploratory", "not comparable")
    assert "6 of 6 runs began under another version of study.yaml" in verdict.reasons[0]
    assert any("steps is 46, not 50" in reason for reason in verdict.reasons)


def test_study_does_not_start_if_profile_was_measured_with_other_settings(tmp_path):
    study = seconds_study(tmp_path)
    write_profile(tmp_path / "timing.json", seq_len="64")
    with pytest.raises(ConfigError, match=r"arm standard: seq_len is 32, but budget\.profile="):
        check_study_runs(load_study(study.path), tmp_path / "out", 1)


def test_study_loads_without_its_profile_to_measure_the_profile(tmp_path):
    path = seconds_study(tmp_path).path
    (tmp_path / "timing.json").unlink()
    assert load_study(path, is_timed=False).budget == "tokens"


@pytest.mark.parametrize(
    ("budget", "more", "message"),
    [
        ("time", {}, "budget=time is not one of tokens, flops, or a mapping such as"),
        ("[flops]", {}, "budget=['flops'] must be text"),
        ("{seconds: 6}", {}, "budget.profile is missing"),
        ("{seconds: 0, profile: timing.json}", {}, "budget.seconds=0.0 must be positive"),
        ("{seconds: 6, profil: timing.json}", {}, "unknown key budget.profil"),
        ("{seconds: 6, profile: none.json}", {}, "none.json cannot be read: No such file"),
        ("{seconds: 6, profile: study.yaml}", {}, "budget.profile: "),
        ("{seconds: 0.12, profile: timing.json}", {}, "one training step of arm v2"),
        ("{seconds: 1e30, profile: timing.json}", {}, "budget.seconds=1e+30 must be at most "),
        (
            "{seconds: 6, profile: timing.json}",
            {"arms": "{standard: [], v3: [attention=diff_v2]}"},
            "the timing profile has no arm 'v3'; choose from standard, v2",
        ),
        ("{seconds: 6, profile: timing.json}", {"base": ARMS["base"]}, "base: remove steps=100"),
        ("flops", {"arms": "{standard: [], v2: [steps=3]}"}, "arms.v2: remove steps=3, because"),
        (
            "flops",
            {"rule": "{kind: log_rank, arm: v2, against: standard, reaches: 0.5}"},
            "kind=log_rank compares equal tokens",
        ),
    ],
)
def test_invalid_budget_raises_one_error(tmp_path, budget, more, message):
    write_profile(tmp_path / "timing.json")
    rule = "{kind: difference, arm: %s, against: standard, below: 0.0}"
    keys = {**SECONDS, "rule": rule % ("v3" if "v3" in str(more) else "v2"), **more}
    if "log_rank" in keys["rule"]:
        keys["metric"] = "tasks/mqar"
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        study_file(tmp_path / "study.yaml", **{**keys, "budget": budget})
    assert "\n" not in str(raised.value)


def test_budget_in_flops_needs_visible_keys_with_document_masks(tmp_path):
    study = flops_study(tmp_path)
    masked = replace(study, base=[*study.base, "data.mask_documents=true"])
    with pytest.raises(ConfigError, match=r"arm v2: budget=flops with data\.mask_documents"):
        steps_of_arm(masked, "v2")


@pytest.mark.slow
def test_study_with_equal_flops_runs_and_agrees_in_measured_flops(tmp_path, output_of):
    base = "[model=tiny, data=stdlib, steps=20, seq_len=32, global_batch_size=4, eval.tokens=2000]"
    more = {**ARMS, "base": base, "seeds": "[0, 1]", "budget": "flops"}
    study = study_file(tmp_path / "study.yaml", LOWER, **more)
    out = tmp_path / "out"
    assert "Budget: the training FLOPs of the runs of standard." in output_of(
        "study", "run", study.path, f"out={out}", "--dry-run"
    )
    assert main(["study", "run", str(study.path), f"out={out}"]) == 0
    verdict = judge(study, out)
    assert verdict.verdict not in ("not comparable", "exploratory"), verdict.reasons
    standard, v2 = verdict.numbers()["budget"]["arms"]
    assert (standard["steps"], v2["steps"]) == (20, 19)
    for arm in (standard, v2):
        assert arm["measured"] == pytest.approx(arm["planned"])
