"""Verdicts on the rules of a study, with Holm's correction for several rules.

Each rule has a test whose alternative is the claim, and a test whose alternative is the opposite
claim. Holm's correction is applied to the tests of the claims, and separately to the tests of the
opposite claims. The probability that a study has a false "shown" is therefore at most alpha. The
same holds for a false "refuted".
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diffllm.compare.arms.gap import arm_gap
from diffllm.compare.arms.sentences import compact
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.file import Rule, Study
from diffllm.compare.study.removed_rules import replacement_of
from diffllm.compare.study.rule_tests import BELOW, NEVER, Tested, measure, side_of
from diffllm.compare.study.trend import arms_of_rule
from diffllm.statistics.estimates import Times
from diffllm.statistics.gap_tests import holm

SHOWN, REFUTED, EQUIVALENT = "shown", "refuted", "equivalent"
UNEQUAL = "equivalent, not equal"
NOT_ROBUST, NOT_DECIDABLE, UNDERPOWERED = "not robust", "not decidable", "underpowered"
NO_LONGER_JUDGED = "no longer judged"


def apply_rules(study: Study, arms: dict[str, StudyArm]) -> list[Tested]:
    """Return the tests and the verdict of each rule, in the order of the study's rules."""
    found = [tested_rule(study, rule, arms) for rule in study.rules]
    families: dict[str, list[float | None]] = {}
    for side in ("showing", "refuting"):
        sides = [getattr(each, side) for each in found]
        families[side] = [each.p for each in sides]
        families[f"{side}_exact"] = [each.exact for each in sides]
    adjusted = {name: holm_of_known(family) for name, family in families.items()}
    exact_tests = sum(each.showing.exact is not None for each in found)
    decided = []
    for i, each in enumerate(found):
        p_of = {name: p[i] for name, p in adjusted.items()}
        each = replace(each, adjusted=p_of)
        verdict, reason = decide(study, each, exact_tests)
        if each.best_losses:
            reason += f"; {each.best_losses}"
        decided.append(replace(each, verdict=verdict, reason=reason))
    return decided


def tested_rule(study: Study, rule: Rule, arms: dict[str, StudyArm]) -> Tested:
    if replacement_of(study, rule):
        outcome = arm_gap(arms[rule.arm].values, arms[rule.against].values)
        return Tested(rule, outcome, showing=NEVER, refuting=NEVER)
    return measure(study, rule, *arms_of_rule(study, rule, arms))


def holm_of_known(p_values: Sequence[float | None]) -> list[float | None]:
    """Apply Holm's correction to the p-values that are not None; None entries remain None."""
    adjusted = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(adjusted) for p in p_values]


def decide(study: Study, tested: Tested, exact_tests: int) -> tuple[str, str]:
    """Return the verdict on a tested rule, such as "shown", and the reason for the verdict.

    Args:
        exact_tests: number of the study's rules for which an exact p-value was computed.
    """
    rule = tested.rule
    if replacement := replacement_of(study, rule):
        return NO_LONGER_JUDGED, replacement
    if tested.chance:
        return NOT_DECIDABLE, tested.chance
    significant = {name: p is not None and p < rule.alpha for name, p in tested.adjusted.items()}
    for side in ("showing", "refuting"):
        if significant[side]:
            verdict = verdict_of_significant(tested, side)
            reason = f"{words(study, tested, side)}, adjusted p {tested.adjusted[side]:.2g}"
            if problem := not_robust(tested, side, exact_tests):
                return NOT_ROBUST, f"{reason}; {problem}"
            return verdict, reason
    said = words(study, tested)
    if (tested.times is None and tested.gap is None) or tested.showing.p is None:
        return UNDERPOWERED, said
    if tested.gap is not None and tested.gap.zero_variance:
        return UNDERPOWERED, f"{said} in every seed: without variance nothing is shown"
    return UNDERPOWERED, f"{said}: neither shown nor refuted"


def verdict_of_significant(tested: Tested, side: str) -> str:
    if side == "refuting":
        return REFUTED
    return equivalent(tested) if tested.rule.kind == "equivalence" else SHOWN


def equivalent(tested: Tested) -> str:
    """Return "equivalent", or "equivalent, not equal" if the gap differs significantly from 0."""
    p = tested.gap.p if tested.gap else None
    return UNEQUAL if p is not None and p < tested.rule.alpha else EQUIVALENT


def not_robust(tested: Tested, side: str, exact_tests: int) -> str:
    """Return a message if the exact test contradicts a significant t test, otherwise "".

    Args:
        side: "showing" if the t test supports the claim, "refuting" if it supports the opposite.
        exact_tests: number of the study's rules for which an exact p-value was computed.
    """
    alpha, decides = tested.rule.alpha, getattr(tested, side)
    if decides.diverged or tested.times is not None:
        return ""
    exact = tested.adjusted[f"{side}_exact"]
    if exact is not None and exact >= alpha > tested.smallest * decides.tests * exact_tests:
        return f"the sign-flip test does not confirm it (adjusted p {exact:.2g})"
    return ""


def words(study: Study, tested: Tested, side: str = "") -> str:
    """Describe the measured gap between a rule's arms, its confidence bounds and its seeds.

    Args:
        side: "showing" to give only the confidence bound that supports the rule's claim,
            "refuting" to give only the bound that supports the opposite claim, "" to give both.
    """
    rule, own, base = tested.rule, tested.outcome.own, tested.outcome.base
    shares = (
        f"{own.diverged} of {own.runs} runs of {rule.arm} and {base.diverged} of {base.runs} of "
        f"{rule.against} diverged"
    )
    if side and getattr(tested, side).diverged:
        return shares
    diverged = f"; {shares}" if own.diverged + base.diverged else ""
    if tested.times is not None:
        return times_words(rule, *tested.times) + diverged
    gap, bounds = tested.gap, tested.bounds
    if gap is None or bounds is None:
        return f"fewer than two seeds have a number in both arms{diverged}"
    verb = "changes by" if rule.kind == "trend" else "is"
    mean = f"{rule.arm} minus {rule.against} {verb} {gap.mean:+.4g} {study.unit}".rstrip()
    if rule.kind == "trend":
        mean += f" per doubling of {rule.over}"
    if gap.zero_variance:
        return mean + diverged
    level = f"{100 * (1 - rule.alpha):g}%"
    low, high = (f"{x:+.4g}" for x in bounds)
    if rule.kind == "equivalence":
        said = f"{100 * (1 - 2 * rule.alpha):g}% interval {low} to {high}"
    elif side:
        below = (side_of(rule)[0] == BELOW) == (side == "showing")
        said = f"{level} {'upper' if below else 'lower'} bound {high if below else low}"
    else:
        said = f"{level} bounds {low} and {high}"
    wider = " over documents and seeds" if gap.document_error else ""
    text = f"{mean} ({said}{wider}, {gap.seeds} paired seeds){diverged}"
    if names := tested.undocumented:
        more = ", ..." * (len(names) > 3)
        text += "; the bounds omit documents, because these runs have no losses of documents: "
        text += f"{', '.join(names[:3])}{more}"
    return text


def times_words(rule: Rule, own: Times, base: Times) -> str:
    said = "; ".join(
        f"{side.count} of {len(side.tokens)} runs of {name} reach it"
        + (f", half of them by {compact(side.median)} tokens" if side.median else "")
        for name, side in ((rule.arm, own), (rule.against, base))
    )
    few = min(len(own.tokens), len(base.tokens)) < 2 or not own.count + base.count
    return f"{said}: no test" if few else said


def tested_numbers(tested: Tested) -> dict[str, Any]:
    rule, gap, other = tested.rule, tested.gap, tested.outcome
    low, high = tested.bounds or (None, None)
    return {
        **vars(rule),
        "verdict": tested.verdict,
        "reason": tested.reason,
        "gap": gap and gap.mean,
        "gap_low": low,
        "gap_high": high,
        "confidence": 1 - rule.alpha,
        "error": gap and gap.error,
        "error_documents": gap and gap.document_error,
        "seeds": gap and gap.seeds,
        "p": tested.showing.p,
        "p_opposite": tested.refuting.p,
        "p_exact": tested.showing.exact,
        "p_exact_opposite": tested.refuting.exact,
        "p_smallest": tested.smallest,
        "p_adjusted": tested.p_adjusted,
        **{f"p_adjusted_{name}": p for name, p in tested.adjusted.items() if name != "showing"},
        "seed_correlation": other.correlation,
        "diverged": {rule.arm: other.own.diverged, rule.against: other.base.diverged},
    }
