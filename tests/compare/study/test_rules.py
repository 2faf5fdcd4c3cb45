"""Verdicts by rules, on forged numbers of arms without runs."""

import math
from dataclasses import replace

import numpy as np
import pytest
from runs.written import ALIKE, LOWER, SOONER, study_file

from diffllm.compare.study.arms import StudyArm, StudyRun, Texts
from diffllm.compare.study.decision import apply_rules
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.statistics.gap_tests import holm

NAN = math.nan


HIGHER = LOWER.replace("below", "above")


TREND = LOWER.replace("difference", "trend, over: tokens")
WITH_MARGIN = LOWER.replace("}", ", margin: 0.02}")
ACCURACY = {"metric": "tasks/mqar"}


def forged_run(seed, value, documents=None, **more):
    number = None if math.isnan(value) else value
    if documents:
        more |= {"texts": Texts.of(documents), "nats": documents.nats.tolist()}
    return StudyRun(f"run-seed{seed}", "v2", seed, 1e-3, number, number, 1000, 4096, **more)


def forged(name, values, curves=None, documents=None, chance=None):
    """Return an arm with one run per seed; NaN marks a diverged run."""
    runs = [
        forged_run(
            seed,
            value,
            documents[seed] if documents else None,
            tokens=curves[seed][0].tolist() if curves else [],
            values=curves[seed][1].tolist() if curves else [],
            chance=chance,
        )
        for seed, value in enumerate(values)
    ]
    return StudyArm(name, {run.seed: run.value for run in runs}, runs=runs)


def decided(tmp_path, rule, arms, **more):
    rules = rule if isinstance(rule, list) else [rule]
    also = {"also": f"[{', '.join(rules[1:])}]"} if rules[1:] else {}
    study = study_file(tmp_path / "study.yaml", rules[0], **also, **more)
    return apply_rules(study, {arm.label: arm for arm in arms})


def two(v2, half, **more):
    return [forged("v2", v2, **more), forged("half", half, **more)]


def reaching(tokens):
    """Return curves of runs that reach 0.9 after these tokens; None: the run never reaches 0.9."""
    at = np.arange(100, 1001, 100)
    return [(at, np.where(at >= (math.inf if t is None else t), 0.95, 0.3)) for t in tokens]


def timed(name, tokens, diverged=()):
    values = [NAN if seed in diverged else 0.5 for seed in range(len(tokens))]
    return forged(name, values, curves=reaching(tokens))


def noise(n, sd=0.01, seed=0):
    return np.random.default_rng(seed).normal(0, sd, n)


HALF, BETTER = [4.40, 4.41, 4.39], [4.30, 4.312, 4.289]


@pytest.mark.parametrize(
    ("rule", "v2", "verdict"),
    [
        (LOWER, BETTER, "shown"),
        (LOWER, [4.50, 4.512, 4.489], "refuted"),
        (LOWER, [4.30, 4.50, 4.40], "underpowered"),
        (LOWER, [4.401, 4.409, 4.391], "underpowered"),
        (ALIKE, [4.401, 4.409, 4.391], "equivalent"),
        (ALIKE, BETTER, "refuted"),
        (ALIKE, [4.30, 4.50, 4.40], "underpowered"),
        (LOWER.replace("below: 0.0", "below: -0.2"), BETTER, "refuted"),
        # Zero variance shows nothing and is no error.
        (LOWER, [loss - 0.1 for loss in HALF], "underpowered"),
        (LOWER, [loss + 0.1 for loss in HALF], "underpowered"),
        (LOWER, HALF, "underpowered"),
        (ALIKE, HALF, "equivalent"),
        # A diverged run is an outcome.
        (LOWER, [4.30, 4.312, NAN], "underpowered"),
        (LOWER, [NAN, NAN], "refuted"),
        (ALIKE, [4.401, 4.409, NAN], "underpowered"),
    ],
)
def test_verdict_depends_on_mean_gap_and_variance_over_seeds(tmp_path, rule, v2, verdict):
    (tested,) = decided(tmp_path, rule, two(v2, HALF))
    assert tested.verdict == verdict, tested.reason


def test_log_rank_test_of_three_seeds_has_exact_permutation_p_value(tmp_path):
    arms = [timed("v2", [200, 300, 300]), timed("half", [600, 700, None])]
    (tested,) = decided(tmp_path, SOONER, arms, **ACCURACY)
    assert tested.showing.p == pytest.approx(1 / 20)
    assert tested.verdict == "underpowered", "p of 3 against 3 seeds is never below 0.05"
    arms = [timed("v2", [200, 300, 300, 400]), timed("half", [600, 700, None, 900])]
    (tested,) = decided(tmp_path, SOONER, arms, **ACCURACY)
    assert (tested.verdict, tested.showing.p) == ("shown", pytest.approx(1 / 70))
    (tested,) = decided(tmp_path, SOONER.replace("v2, against: half", "half, against: v2"), arms,
                       **ACCURACY)  # fmt: skip
    assert (tested.verdict, tested.refuting.p) == ("refuted", pytest.approx(1 / 70))


@pytest.mark.parametrize(("tokens", "count", "p"), [(300, 8, 1), (None, 0, None)])
def test_log_rank_rule_is_underpowered_if_arms_learn_equally_fast(tmp_path, tokens, count, p):
    arms = [timed("v2", [tokens] * 8), timed("half", [tokens] * 8)]
    (tested,) = decided(tmp_path, SOONER, arms, **ACCURACY)
    assert (tested.verdict, tested.showing.p) == ("underpowered", p)
    assert f"{count} of 8 runs of v2 reach it" in tested.reason


def test_log_rank_p_value_does_not_depend_on_order_of_seeds(tmp_path):
    v2, half = [200, 300, 400, 500, 600], [300, 500, 700, 900, None]
    arms = [timed("v2", v2 * 2), timed("half", half * 2)]
    (tested,) = decided(tmp_path, SOONER, arms, **ACCURACY)
    for arm in arms:
        arm.runs.sort(key=lambda run: run.seed % 3)
    (again,) = decided(tmp_path, SOONER, arms, **ACCURACY)
    assert again.showing.p == tested.showing.p


def test_log_rank_test_censors_diverged_run_despite_reached_accuracy(tmp_path):
    arm = timed("v2", [200, 300], diverged=[1])
    assert arm.times(0.9).reached == [True, False]
    assert arm.times(0.9).tokens == [200, 1000], "censored at the planned tokens"


@pytest.mark.parametrize(
    ("metric", "rule", "sign"),
    [
        ("heldout_loss", LOWER, -1),
        ("tasks/mqar", HIGHER, 1),
        ("hidden_top1", LOWER, -1),
        ("hidden_top1", HIGHER, 1),
    ],
)
def test_difference_rule_is_underpowered_if_better_arm_diverges_more(tmp_path, metric, rule, sign):
    half = 3.0 + noise(8)
    v2 = half + sign * (1 + noise(8, seed=1))
    (clear,) = decided(tmp_path, rule, two(v2, half), metric=metric)
    assert clear.verdict == "shown"
    v2[:2] = NAN
    (tested,) = decided(tmp_path, rule, two(v2, half), metric=metric)
    assert tested.verdict == "underpowered"
    assert "2 of 8 runs of v2 and 0 of 8 of half diverged" in tested.reason
    against = rule.replace("v2, against: half", "half, against: v2")
    opposite = against.replace("below", "up").replace("above", "below").replace("up", "above")
    (other,) = decided(tmp_path, opposite, two(v2, half), metric=metric)
    assert other.verdict == "underpowered"


@pytest.mark.parametrize("diverged", [1, 3, 4])
@pytest.mark.parametrize(("rule", "metric"), [(LOWER, "heldout_loss"), (SOONER, "tasks/mqar")])
def test_rule_is_underpowered_if_arms_have_unequal_divergence(tmp_path, rule, metric, diverged):
    worse = [NAN] * diverged + [4.0] * (5 - diverged)
    other = [NAN] * (diverged > 3) + [3.9] * (5 - (diverged > 3))
    for values in ((worse, other), (other, worse)):
        arms = [
            forged(name, np.array(x) + noise(5, 0.001, seed), curves=reaching([at] * 5))
            for seed, (name, x, at) in enumerate(
                zip(("v2", "half"), values, (200, 800), strict=True)
            )
        ]
        (tested,) = decided(tmp_path, rule, arms, metric=metric)
        assert tested.verdict == "underpowered", tested.reason


def test_log_rank_rule_is_underpowered_if_faster_arm_has_more_diverged_runs(tmp_path):
    arms = [timed("v2", [100] * 7 + [None], diverged=[7]), timed("half", [800] * 8)]
    (tested,) = decided(tmp_path, SOONER, arms, **ACCURACY)
    assert (tested.verdict, tested.showing.p) == ("underpowered", 1)
    (same,) = decided(tmp_path, SOONER, [timed("v2", [100] * 7 + [None]), arms[1]], **ACCURACY)
    assert same.verdict == "shown", "without divergence the same times decide"


@pytest.mark.parametrize(
    ("metric", "rule", "v2_diverges", "verdict"),
    [
        ("heldout_loss", LOWER, True, "refuted"),
        ("heldout_loss", LOWER, False, "shown"),
        ("heldout_loss", HIGHER, True, "shown"),
        ("heldout_loss", HIGHER, False, "refuted"),
        ("heldout_loss", ALIKE, True, "refuted"),
        ("tasks/mqar", HIGHER, True, "refuted"),
        ("tasks/mqar", HIGHER, False, "shown"),
        ("hidden_top1", HIGHER, True, "underpowered"),
    ],
)
def test_arm_with_only_diverged_runs_is_the_worse_arm(tmp_path, metric, rule, v2_diverges, verdict):
    arms = [[NAN] * 4, list(4 + noise(4))]
    (tested,) = decided(tmp_path, rule, two(*(arms if v2_diverges else arms[::-1])), metric=metric)
    assert tested.verdict == verdict, tested.reason
    if verdict != "underpowered":
        assert tested.reason.startswith("4 of 4 runs" if v2_diverges else "0 of 4 runs of v2 and 4")


@pytest.mark.parametrize("shift", [-0.02, -0.008, -0.004, 0.0, 0.004, 0.02])
def test_verdict_of_difference_rule_matches_confidence_bounds(tmp_path, shift):
    half = 4 + noise(8)
    arms = two(half + shift + noise(8, 0.006, seed=3), half)
    for rule in (LOWER, HIGHER):
        (tested,) = decided(tmp_path, rule, arms)
        low, high = tested.bounds
        excluded = (high < 0, low > 0) if rule == LOWER else (low > 0, high < 0)
        assert (tested.verdict == "shown", tested.verdict == "refuted") == excluded
        if tested.verdict == "shown":
            word, bound = ("upper", high) if rule == LOWER else ("lower", low)
            assert f"95% {word} bound {bound:+.4g}" in tested.reason


def test_p_value_of_refutation_is_multiplied_by_number_of_rules_in_study(tmp_path):
    half, standard = 4 + noise(6), 4.02 + noise(6, seed=7)
    v2 = half + 0.005 + noise(6, 0.008, seed=1)
    arms = [*two(v2, half), forged("standard", standard)]
    (alone,) = decided(tmp_path, LOWER, arms)
    assert alone.verdict == "refuted"
    assert 0.05 / 3 < alone.refuting.p < 0.05
    second = LOWER.replace("half", "standard")
    third = LOWER.replace("v2, against: half", "half, against: standard")
    tested, *_ = decided(tmp_path, [LOWER, second, third], arms)
    assert tested.adjusted["refuting"] == pytest.approx(3 * alone.refuting.p)
    assert tested.verdict == "underpowered"


@pytest.mark.parametrize(
    ("shift", "rule", "verdict"),
    [
        (0.01, WITH_MARGIN, "refuted"),
        (-0.01, WITH_MARGIN, "shown"),
        (0.0, WITH_MARGIN, "underpowered"),
        (0.01, ALIKE, "equivalent, not equal"),
        (0.0, ALIKE, "equivalent"),
        (0.05, ALIKE, "refuted"),
    ],
)
def test_difference_rule_returns_expected_verdict_for_each_gap_size(tmp_path, shift, rule, verdict):
    half = 4 + noise(8)
    differences = noise(8, 0.003, seed=1)
    v2 = half + shift + differences - differences.mean()
    (tested,) = decided(tmp_path, rule, two(v2, half))
    assert tested.verdict == verdict, tested.reason


def test_holm_correction_includes_rules_that_test_equivalence(tmp_path):
    half, differences = 4 + noise(8), noise(8, 0.0115, seed=1)
    arms = two(half - 0.0135 + differences - differences.mean(), half)
    tested = decided(tmp_path, [ALIKE, LOWER], arms)
    p_values = [each.showing.p for each in tested]
    assert [each.adjusted["showing"] for each in tested] == holm(p_values)
    assert tested[1].adjusted["showing"] == 2 * tested[1].showing.p
    assert [each.verdict for each in tested] == ["equivalent, not equal", "shown"]


def test_verdict_is_not_robust_if_exact_test_does_not_confirm_t_test(tmp_path):
    # One sign differs, so that 2 of 32 assignments of signs have a sum as large.
    differences = np.array([-0.03, -0.031, -0.029, -0.03, 0.0001, -0.03])
    half = 4 + noise(6)
    (tested,) = decided(tmp_path, LOWER, two(half + differences, half))
    assert tested.showing.exact == pytest.approx(2 / 64)
    assert tested.verdict == "shown"
    others = [LOWER.replace("half", "standard")]
    arms = [*two(half + differences, half), forged("standard", half + differences + noise(6))]
    tested, _ = decided(tmp_path, [LOWER, *others], arms)
    assert tested.smallest == 1 / 64
    assert tested.adjusted["showing"] < 0.05 <= tested.adjusted["showing_exact"]
    assert tested.verdict == "not robust"
    assert "the sign-flip test does not confirm it (adjusted p 0.062)" in tested.reason


def test_verdict_ignores_exact_test_if_seeds_are_too_few(tmp_path):
    half = 4 + noise(4)
    (tested,) = decided(tmp_path, LOWER, two(half - 0.1 + noise(4, 0.001, seed=1), half))
    assert (tested.smallest, tested.showing.exact) == (1 / 16, 1 / 16)
    assert tested.verdict == "shown"


@pytest.mark.parametrize(
    ("outlier", "seeds", "verdict"),
    [(0.09, 5, "refuted"), (0.03, 6, "refuted"), (0.015, 6, "not robust")],
)
def test_equivalence_is_refuted_if_two_sided_exact_test_agrees(tmp_path, outlier, seeds, verdict):
    half, gaps = 4 + noise(seeds), 0.1 + noise(seeds, seed=1)
    gaps[0] = outlier
    (tested,) = decided(tmp_path, ALIKE, two(half + gaps, half))
    assert tested.adjusted["refuting"] < 0.05
    assert tested.verdict == verdict, tested.reason


def test_holm_correction_of_exact_tests_excludes_log_rank_rules(tmp_path):
    half = 0.5 + noise(5)
    gaps = np.array([0.03, 0.031, 0.029, 0.03, -0.0001])
    arms = [
        forged("v2", half + gaps, curves=reaching([200] * 5)),
        forged("half", half, curves=reaching([500] * 5)),
    ]
    tested, _ = decided(tmp_path, [HIGHER, SOONER], arms, **ACCURACY)
    assert (tested.smallest, tested.adjusted["showing_exact"]) == (1 / 32, 2 / 32)
    assert tested.verdict == "not robust", tested.reason


def document_losses(losses, texts, tokens):
    """Losses of a run on documents whose mean is the run's loss."""
    n = len(texts)
    return DocumentLosses(
        (losses + texts) * tokens, np.full(n, tokens), np.full(n, 4 * tokens),
        np.arange(n), np.zeros(n, np.int64),
    )  # fmt: skip


def arms_with_documents(gaps, sd, n=24, seeds=8):
    """Return two arms whose gap varies by `sd` between documents and little between seeds."""
    of_texts, varying = np.random.default_rng(5).normal(0, 0.5, n), noise(n, sd, seed=6)
    varying -= varying.mean()
    half, v2 = 4 + noise(seeds), 4 + noise(seeds) + gaps + noise(seeds, 0.001, seed=2)
    return [
        forged("v2", v2, documents=[document_losses(x, of_texts + varying, 100) for x in v2]),
        forged("half", half, documents=[document_losses(x, of_texts, 100) for x in half]),
    ]


@pytest.mark.parametrize("seeds", [3, 8])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_bounds_of_loss_gap_include_error_over_documents(tmp_path, scale, seeds):
    for sd, verdict in ((0.2, "underpowered"), (0.01, "shown")):
        arms = arms_with_documents(-0.05, sd, seeds=seeds)
        if scale == "log":
            for arm in arms:
                arm.seed_values.update({seed: math.log(x) for seed, x in arm.seed_values.items()})
        (tested,) = decided(tmp_path, LOWER, arms, scale=scale)
        of_seeds = tested.outcome.paired.error
        assert tested.gap.error == pytest.approx(math.hypot(of_seeds, tested.gap.document_error))
        unit = 1 if scale == "linear" else 1 / 4
        assert tested.gap.document_error == pytest.approx(unit * sd / math.sqrt(24), rel=0.35)
        assert (tested.bounds[1] < 0) == (verdict == "shown")
        assert tested.verdict == verdict
        assert "over documents and seeds" in tested.reason


def test_clear_gap_in_eight_rules_is_shown_over_documents(tmp_path):
    arms = arms_with_documents(-0.5, 0.1, n=200)
    tested = decided(tmp_path, [LOWER] * 8, arms)
    assert [each.verdict for each in tested] == ["shown"] * 8


def test_equivalence_is_underpowered_if_gap_varies_between_documents(tmp_path):
    for sd, verdict in ((0.005, "equivalent"), (0.2, "underpowered")):
        (tested,) = decided(tmp_path, ALIKE, arms_with_documents(0.0, sd))
        assert tested.verdict == verdict
        low, high = tested.bounds
        assert (low > -0.02 and high < 0.02) == (verdict == "equivalent")


@pytest.mark.parametrize(
    ("reason", "lacks_losses"),
    [
        ("these runs have no losses of documents: run-seed8", True),
        ("the runs were measured on different documents", False),
    ],
)
def test_bounds_omit_different_or_missing_documents(tmp_path, reason, lacks_losses):
    v2, half = arms_with_documents(-0.1, 0.2, seeds=9)
    for i, run in enumerate(half.runs):
        texts = replace(run.texts, texts=[number + 1 for number in run.texts.texts])
        if not lacks_losses:
            half.runs[i] = replace(run, texts=texts)
    if lacks_losses:
        half.runs[8] = replace(half.runs[8], texts=None)
    (tested,) = decided(tmp_path, LOWER, [v2, half])
    assert (tested.verdict, tested.gap.document_error) == ("shown", None)
    assert tested.reason.count(f"because {reason}") == 1


def test_bounds_of_gap_between_shares_end_at_possible_values(tmp_path):
    arms = two([0.0, 0.9, 0.1], [1.0, 0.1, 0.9])
    (tested,) = decided(tmp_path, HIGHER, arms, **ACCURACY)
    assert tested.bounds == (-1, 1)
    assert "95% bounds -1 and +1" in tested.reason
    (tested,) = decided(tmp_path, HIGHER, arms)
    assert tested.bounds[0] < -1
    assert tested.bounds[1] > 1


@pytest.mark.parametrize(
    ("v2", "half", "verdict"),
    [
        (0.2, 0.2, "not decidable"),
        (1.0, 0.995, "not decidable"),
        (0.6, 0.2, "shown"),
        (1.0, 0.6, "shown"),
    ],
)
def test_verdict_is_not_decidable_if_arms_are_at_chance_or_ceiling(tmp_path, v2, half, verdict):
    arms = [
        forged(name, np.clip(mean + noise(6, 0.002, seed), 0, 1), chance=0.2)
        for seed, (name, mean) in enumerate([("v2", v2), ("half", half)])
    ]
    if verdict == "not decidable":
        arms[0].seed_values.update({seed: x - 0.002 for seed, x in arms[0].finite_values.items()})
    (tested,) = decided(tmp_path, HIGHER, arms, **ACCURACY)
    assert tested.verdict == verdict, tested.reason
    if verdict == "not decidable":
        assert ("chance (0.200)" if v2 < 0.5 else "ceiling") in tested.reason


@pytest.mark.parametrize("half", [0.2, 0.998])
def test_accuracy_rule_is_refuted_if_all_runs_of_favoured_arm_diverge(tmp_path, half):
    arms = two([NAN] * 5, half + noise(5, 0.001), chance=0.2)
    (tested,) = decided(tmp_path, HIGHER, arms, **ACCURACY)
    assert tested.verdict == "refuted", tested.reason


def test_run_whose_final_metric_is_not_finite_counts_as_diverged(tmp_path):
    arms = [timed("v2", [200] * 8), timed("half", [800] * 8)]
    arms[0].runs[0] = replace(arms[0].runs[0], value=None)
    arms[0].seed_values[0] = None
    (tested,) = decided(tmp_path, SOONER, arms, **ACCURACY)
    assert (tested.verdict, arms[0].diverged) == ("underpowered", 1)
    assert "7 of 8 runs of v2 reach it" in tested.reason
    assert "1 of 8 runs of v2 and 0 of 8 of half diverged" in tested.reason


@pytest.mark.parametrize("lost", ["v2", "half", None])
@pytest.mark.parametrize(("rule", "gap"), [(LOWER, -0.3), (HIGHER, 0.3), (ALIKE, 0.0)])
def test_lr_sensitivity_rule_is_underpowered_if_better_arm_diverges(tmp_path, rule, gap, lost):
    half = 0.4 + noise(5)
    arms = two(half + gap + noise(5, 0.001, seed=1), half)
    for arm in arms:  # one of two rates diverged: the sensitivity is finite
        value = None if arm.label == lost else 3.0
        arm.runs.extend([replace(run, value=value, loss=value) for run in arm.runs])
    sweep = {"lr_sweep": "[0.001, 0.004]", "metric": "lr_sensitivity"}
    (tested,) = decided(tmp_path, rule, arms, **sweep)
    worse = {LOWER: "half", HIGHER: "v2", ALIKE: None}[rule]
    verdict = "equivalent" if rule == ALIKE else "shown"
    assert tested.verdict == (verdict if lost in (None, worse) else "underpowered"), tested.reason
    assert ("5 of 10 " in tested.reason) == (lost is not None)


@pytest.mark.parametrize(
    ("rule", "more", "replacement"),
    [
        (LOWER.replace("}", ", at: flops}"), {}, "set budget: flops to compare arms"),
        (TREND, {}, "the verdict page and the report state this trend without a rule"),
        (TREND.replace("tokens", "position"), {}, "such as metric: position/1024"),
        (LOWER.replace("0.0", "0.1"), {}, "use below=0, or kind=equivalence with margin=0.1"),
        (ALIKE, {"test": "welch"}, "remove the key, because arms are compared at equal seeds"),
    ],
)
def test_removed_rule_of_saved_study_is_no_longer_judged(tmp_path, rule, more, replacement):
    half = 4 + noise(8)
    arms = [*two(half - 0.1 + noise(8, 0.001, seed=1), half), forged("standard", half + 0.1)]
    (tested,) = decided(tmp_path, rule, arms, **more)
    assert (tested.verdict, tested.gap) == ("no longer judged", None)
    assert replacement in tested.reason


def test_holm_correction_counts_removed_rules_of_saved_study(tmp_path):
    half = 4 + noise(8)
    arms = two(half - 0.1 + noise(8, 0.001, seed=1), half)
    tested, removed = decided(tmp_path, [LOWER, LOWER.replace("}", ", at: flops}")], arms)
    assert (tested.verdict, removed.verdict) == ("shown", "no longer judged")
    assert tested.adjusted["showing"] == pytest.approx(2 * tested.showing.p)


def test_lr_sensitivity_rule_names_arm_that_is_worse_at_best_rate(tmp_path):
    half = 0.4 + noise(5)
    arms = two(half - 0.3 + noise(5, 0.001, seed=1), half)
    for arm, losses in zip(arms, ((6.5, 6.6), (4.2, 6.0)), strict=True):
        first, second = ([replace(run, loss=x, lr=x) for run in arm.runs] for x in losses)
        arm.runs[:] = [*first, *second]
    sweep = {"lr_sweep": "[0.001, 0.004]", "metric": "lr_sensitivity"}
    (tested,) = decided(tmp_path, LOWER, arms, **sweep)
    assert tested.verdict == "shown"
    assert "loss at the best learning rate: v2 6.5, half 4.2 (v2 is worse)" in tested.reason
