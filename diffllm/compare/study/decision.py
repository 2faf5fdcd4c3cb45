"""Verdicts on the rules of a study, with Holm's correction for several rules.

Each rule has a test whose alternative is the claim, and a test whose alternative is the opposite
claim. Holm's correction is applied to the tests of the claims, and separately to the tests of the
opposite claims. The probability that a study has a false "shown" is therefore at most alpha. The
same holds for a false "refuted".
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from diffllm.compare.arms.sentences import compact
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.file import Rule, Study
from diffllm.compare.study.removed_rules import replacement_of
from diffllm.compare.study.rule_tests import BELOW, RuleTest, Side, rule_test, side_of
from diffllm.statistics.estimates import Times
from diffllm.statistics.gap_tests import holm

SHOWN, REFUTED, EQUIVALENT = "shown", "refuted", "equivalent"
UNEQUAL = "equivalent, not equal"
NOT_ROBUST, NOT_DECIDABLE, UNDERPOWERED = "not robust", "not decidable", "underpowered"
NO_LONGER_JUDGED = "no longer judged"


@dataclass(frozen=True, kw_only=True)
class Tested(RuleTest):
    """A rule with its tests and its verdict."""

    adjusted: dict[str, float | None]
    """P-values after Holm's correction by family, such as "showing" and "showing_exact"."""
    verdict: str
    reason: str


def apply_rules(study: Study, arms: dict[str, StudyArm]) -> list[Tested]:
    """Return the tests and the verdict of each rule, in the order of the study's rules."""
    tests = []
    p_values: defaultdict[str, list[float | None]] = defaultdict(list)
    for rule in study.rules:
        test = rule_test(study, rule, arms)
        tests.append(test)
        # A rule of a removed kind has p = 1. It stays in the family, so that a removal does not
        # make the other rules easier to show.
        for name, side in (("showing", test.showing), ("refuting", test.refuting)):
            p_values[name].append(side.p)
            p_values[f"{name}_exact"].append(side.exact)
    families = {name: holm(family) for name, family in p_values.items()}
    exact_tests = sum(test.showing.exact is not None for test in tests)
    tested = []
    for i, test in enumerate(tests):
        adjusted = {name: family[i] for name, family in families.items()}
        verdict, reason = decide(study, test, adjusted, exact_tests)
        if test.best_losses:
            reason += f"; {test.best_losses}"
        rule_result = Tested(**vars(test), adjusted=adjusted, verdict=verdict, reason=reason)
        tested.append(rule_result)
    return tested


def decide(
    study: Study, test: RuleTest, adjusted: dict[str, float | None], exact_tests: int
) -> tuple[str, str]:
    """Return the verdict on a rule, such as "shown", and the reason for the verdict.

    Args:
        exact_tests: number of the study's rules for which an exact p-value was computed.
    """
    alpha = test.rule.alpha
    gap = test.gap
    replacement = replacement_of(study, test.rule)
    if replacement:
        return NO_LONGER_JUDGED, replacement
    if test.chance:
        return NOT_DECIDABLE, test.chance
    for name, verdict in (("showing", SHOWN), ("refuting", REFUTED)):
        p = adjusted[name]
        exact = adjusted[f"{name}_exact"]
        side: Side = getattr(test, name)
        if p is None or p >= alpha:
            continue
        reason = f"{result_words(study, test, name)}, adjusted p {p:.2g}"
        # Only t tests assume normally distributed values, so only they need a confirmation.
        is_t_test = test.times is None and not side.diverged
        # With few seeds, even the most extreme result of a sign-flip test has a p above alpha. This
        # is no evidence against the t test.
        can_confirm = alpha > test.smallest * side.tests * exact_tests
        if is_t_test and can_confirm and exact is not None and exact >= alpha:
            problem = f"the sign-flip test does not confirm it (adjusted p {exact:.2g})"
            return NOT_ROBUST, f"{reason}; {problem}"
        if verdict == SHOWN and test.rule.kind == "equivalence" and gap:
            # A gap within the margin can still differ significantly from 0.
            verdict = EQUIVALENT if gap.p is None or gap.p >= alpha else UNEQUAL
        return verdict, reason
    reason = result_words(study, test)
    if test.showing.p is None or (test.times is None and gap is None):
        return UNDERPOWERED, reason
    if gap and gap.zero_variance:
        return UNDERPOWERED, f"{reason} in every seed: without variance nothing is shown"
    return UNDERPOWERED, f"{reason}: neither shown nor refuted"


def result_words(study: Study, test: RuleTest, side: str = "") -> str:
    """Describe the measured gap between a rule's arms, its confidence bounds and its seeds.

    Args:
        side: "showing" to give only the confidence bound that supports the rule's claim,
            "refuting" to give only the bound that supports the opposite claim, "" to give both.
    """
    rule = test.rule
    candidate = test.outcome.candidate
    base = test.outcome.base
    shares = (
        f"{candidate.diverged} of {candidate.runs} runs of {rule.arm} and "
        f"{base.diverged} of {base.runs} of {rule.against} diverged"
    )
    if side and getattr(test, side).diverged:
        return shares
    text = times_words(rule, *test.times) if test.times else rule_gap_text(study, test, side)
    if candidate.diverged + base.diverged:
        text += f"; {shares}"
    if test.undocumented:
        names = ", ".join(test.undocumented[:3])
        if len(test.undocumented) > 3:
            names += ", ..."
        text += "; the bounds omit documents, because these runs have no losses of documents: "
        text += names
    elif test.outcome.no_documents and test.bounds:
        text += f"; the bounds omit documents, because {test.outcome.no_documents}"
    return text


def rule_gap_text(study: Study, test: RuleTest, side: str) -> str:
    """Describe the gap of a rule, and the confidence bounds that support one side or both.

    Args:
        side: "showing", "refuting" or "", as in `result_words`.
    """
    rule = test.rule
    gap = test.gap
    bounds = test.bounds
    if gap is None or bounds is None:
        return "fewer than two seeds have a number in both arms"
    is_trend = rule.kind == "trend"
    mean = f"{gap.mean:+.4g} {study.unit}".rstrip()
    verb = "changes by" if is_trend else "is"
    text = f"{rule.arm} minus {rule.against} {verb} {mean}"
    if is_trend:
        text += f" per doubling of {rule.over}"
    if gap.zero_variance:
        return text
    low = f"{bounds[0]:+.4g}"
    high = f"{bounds[1]:+.4g}"
    level = f"{100 * (1 - rule.alpha):g}%"
    if rule.kind == "equivalence":
        # Two one-sided tests at alpha correspond to an interval at confidence 1 - 2 alpha.
        interval = f"{100 * (1 - 2 * rule.alpha):g}% interval {low} to {high}"
    elif not side:
        interval = f"{level} bounds {low} and {high}"
    else:
        claims_below = side_of(rule)[0] == BELOW
        is_showing = side == "showing"
        interval = f"{level} lower bound {low}"
        # An upper bound shows the claim "below", and refutes the claim "above".
        if claims_below == is_showing:
            interval = f"{level} upper bound {high}"
    errors = " over documents and seeds" if gap.document_error else ""
    return f"{text} ({interval}{errors}, {gap.seeds} paired seeds)"


def times_words(rule: Rule, candidate: Times, base: Times) -> str:
    texts = []
    for name, times in ((rule.arm, candidate), (rule.against, base)):
        text = f"{times.count} of {len(times.tokens)} runs of {name} reach it"
        if times.median:
            text += f", half of them by {compact(times.median)} tokens"
        texts.append(text)
    fewest_runs = min(len(candidate.tokens), len(base.tokens))
    if fewest_runs < 2 or not candidate.count + base.count:
        texts[-1] += ": no test"
    return "; ".join(texts)


def tested_numbers(tested: Tested) -> dict[str, Any]:
    rule = tested.rule
    gap = tested.gap
    outcome = tested.outcome
    low, high = tested.bounds or (None, None)
    adjusted = {f"p_adjusted_{name}": p for name, p in tested.adjusted.items()}
    # The claim's own p-value has a shorter key.
    p_adjusted = adjusted.pop("p_adjusted_showing")
    return {
        **vars(rule),
        "verdict": tested.verdict,
        "reason": tested.reason,
        "gap": gap.mean if gap else None,
        "gap_low": low,
        "gap_high": high,
        "confidence": 1 - rule.alpha,
        "error": gap.error if gap else None,
        "error_documents": gap.document_error if gap else None,
        "seeds": gap.seeds if gap else None,
        "p": tested.showing.p,
        "p_opposite": tested.refuting.p,
        "p_exact": tested.showing.exact,
        "p_exact_opposite": tested.refuting.exact,
        "p_smallest": tested.smallest,
        "p_adjusted": p_adjusted,
        **adjusted,
        "seed_correlation": outcome.correlation,
        "diverged": {
            rule.arm: outcome.candidate.diverged,
            rule.against: outcome.base.diverged,
        },
    }
