"""Decisions by the rules of a study."""

from dataclasses import dataclass, replace
from typing import Any

from diffllm.compare.report.numbers import compact, ends
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.file import Rule, Study
from diffllm.statistics.arm_comparison import ArmComparison, compare_arms, diverged_more
from diffllm.statistics.estimates import Times, sooner
from diffllm.statistics.gap_tests import Gap, equivalence, holm

SHOWN, REFUTED, EQUIVALENT = "shown", "refuted", "equivalent"
UNDERPOWERED = "underpowered"


@dataclass(frozen=True)
class Tested:
    rule: Rule
    outcome: ArmComparison
    gap: Gap | None
    p: float | None
    """One-sided."""
    times: tuple[Times, Times] | None = None
    p_adjusted: float | None = None
    """After Holm's correction."""
    verdict: str = ""
    reason: str = ""


def apply_rules(study: Study, arms: dict[str, StudyArm]) -> list[Tested]:
    found = []
    for rule in study.rules:
        own, base = arms[rule.arm], arms[rule.against]
        outcome = compare_arms(own.values, base.values)
        if rule.kind == "log_rank":
            times = own.times(rule.reaches or 0.0), base.times(rule.reaches or 0.0)
            found.append(Tested(rule, outcome, None, sooner(*times), times))
        else:
            gap = outcome.paired if study.test == "paired" else outcome.welch
            found.append(Tested(rule, outcome, gap, p_of(rule, outcome, gap)))
    adjusted = iter(holm([each.p for each in found if each.p is not None]))
    tested = []
    for each in found:
        p = None if each.p is None else next(adjusted)
        if each.times:
            verdict, reason = decide_times(each.rule, *each.times, p)
        else:
            verdict, reason = decide(study, each.rule, each.outcome, each.gap, p)
        tested.append(replace(each, p_adjusted=p, verdict=verdict, reason=reason))
    return tested


def decide_times(rule: Rule, own: Times, base: Times, p_adjusted: float | None) -> tuple[str, str]:
    said = "; ".join(
        f"{side.count} of {len(side.tokens)} runs of {name} reach it"
        + (f", half of them by {compact(side.median)} tokens" if side.median else "")
        for name, side in ((rule.arm, own), (rule.against, base))
    )
    if p_adjusted is None or min(len(own.tokens), len(base.tokens)) < 2:
        return UNDERPOWERED, f"{said}: no test"
    if p_adjusted < rule.alpha:
        return SHOWN, f"{said}, adjusted p {p_adjusted:.2g}"
    other = sooner(base, own)
    if other is not None and other < rule.alpha / 2:
        return REFUTED, f"{said}: {rule.against} is sooner, p {other:.2g}"
    return UNDERPOWERED, f"{said}: neither shown nor refuted"


def p_of(rule: Rule, outcome: ArmComparison, gap: Gap | None) -> float | None:
    """The one-sided p of a rule; 1 for what favours an arm that diverged more often."""
    if gap is None:
        return None
    if rule.margin is not None and rule.kind == "equivalence":
        found = equivalence(gap, rule.margin, rule.alpha)
        diverged = outcome.own.diverged or outcome.base.diverged
        return None if found is None else 1.0 if diverged else found.p
    p = gap.p_below(rule.below) if rule.below is not None else gap.p_above(rule.above or 0.0)
    return 1.0 if p is not None and outcome.favours_diverging else p


def decide(
    study: Study, rule: Rule, outcome: ArmComparison, gap: Gap | None, p_adjusted: float | None
) -> tuple[str, str]:
    """Return the verdict by one rule, and why."""
    diverged = outcome.own.diverged + outcome.base.diverged
    shares = (
        f"{outcome.own.diverged} of {outcome.own.runs} runs of {rule.arm} and "
        f"{outcome.base.diverged} of {outcome.base.runs} of {rule.against} diverged"
    )
    wants_lower = rule.above is None and rule.kind == "difference"
    worse = diverged and wants_lower and diverged_more(outcome.own, outcome.base)
    if worse and outcome.p_diverged < rule.alpha:
        return REFUTED, f"{shares} (Fisher's p {outcome.p_diverged:.2g})"
    interval = gap.interval(1 - rule.alpha) if gap else None
    if gap is None or interval is None:
        return UNDERPOWERED, "fewer than two seeds have a number in both arms"
    low, high = interval
    seeds = f"{gap.seeds} paired" if study.test == "paired" else f"{gap.seeds} and {gap.base_seeds}"
    mean = f"{rule.arm} minus {rule.against} is {gap.mean:+.4g} {study.unit}".rstrip()
    level = f"{100 * (1 - rule.alpha):g}% interval"
    said = f"{mean} ({level} {low:+.4g} to {high:+.4g}, {seeds} seeds)"
    if rule.kind == "difference" and p_adjusted is not None and p_adjusted < rule.alpha:
        return SHOWN, f"{said}, adjusted p {p_adjusted:.2g}"
    close = equivalence(gap, rule.margin, rule.alpha) if rule.margin is not None else None
    by_test = gap.zero_variance or rule.kind == "difference" or (p_adjusted or 0) < rule.alpha
    if close and close.inside and not diverged and by_test:
        return EQUIVALENT, f"{said}, within ±{rule.margin:g}"
    if gap.zero_variance:
        return UNDERPOWERED, f"{mean} in every seed: without variance nothing is shown"
    if rule.kind == "equivalence":
        refuted = rule.margin is not None and (low > rule.margin or high < -rule.margin)
    else:
        refuted = low > rule.below if rule.below is not None else high < (rule.above or 0.0)
    if refuted:
        return REFUTED, f"{said}: the interval lies wholly on the other side"
    return UNDERPOWERED, f"{said}{f'; {shares}' if diverged else ''}: neither shown nor refuted"


def tested_numbers(tested: Tested) -> dict[str, Any]:
    rule, gap, other = tested.rule, tested.gap, tested.outcome
    interval = gap.interval(1 - rule.alpha) if gap else None
    return {
        **vars(rule),
        "verdict": tested.verdict,
        "reason": tested.reason,
        "gap": gap and gap.mean,
        "gap_low": interval and interval[0],
        "gap_high": interval and interval[1],
        "seeds": gap and gap.seeds,
        "p": tested.p,
        "p_adjusted": tested.p_adjusted,
        "seed_correlation": other.correlation,
        **ends("gap_welch", other.welch),
        "diverged": {rule.arm: other.own.diverged, rule.against: other.base.diverged},
    }
