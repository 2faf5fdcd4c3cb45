"""Statistical tests of a study's rules: t tests, permutation tests and tests of diverged runs.

Each rule has two sets of p-values: `showing` for the rule's claim, and `refuting` for the opposite
claim.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diffllm.compare.arms.gap import ArmGap, arm_gap
from diffllm.compare.arms.sentences import percent
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.file import PARAMETERS, Rule, Study, better
from diffllm.compare.study.removed_rules import replacement_of
from diffllm.compare.study.size_trends import slopes
from diffllm.config.matching import TOLERANCE
from diffllm.statistics.divergence import Share, p_all_against_none
from diffllm.statistics.estimates import Times
from diffllm.statistics.gap_tests import Gap, equivalence
from diffllm.statistics.permutation import log_rank, sign_flip
from diffllm.statistics.smallest_p import smallest_p

CEILING = 0.99
"""Smallest mean share of right answers at which an arm is at the ceiling."""
BELOW, ABOVE = -1, 1


@dataclass(frozen=True)
class Side:
    """P-values for the claim of a rule, or for the opposite claim; None for a missing test."""

    p: float | None = None
    """P-value of the test that decides the rule."""
    exact: float | None = None
    """P-value of the exact permutation test that accompanies a t test."""
    diverged: bool = False
    """Whether `p` compares shares of diverged runs."""
    tests: int = 1
    """Number of tests for which all p-values are already corrected."""


NEVER = Side(1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class RuleTest:
    """The measured gap of a rule and its tests, before Holm's correction."""

    rule: Rule
    outcome: ArmGap
    gap: Gap | None = None
    """Gap of the metric with all known errors, or of its slope; None for log-rank rules."""
    largest_gap: float = math.inf
    """Largest possible difference between two values of the metric or slope."""
    times: tuple[Times, Times] | None = None
    """None except for log-rank rules."""
    showing: Side
    refuting: Side
    smallest: float = 1.0
    """Smallest one-sided p that a permutation test can have with these seeds."""
    undocumented: Sequence[str] = ()
    """Names of runs without losses of documents, if other runs have them."""
    chance: str = ""
    """Why accuracies near chance or near 1 cannot decide the rule, or "" if they can."""
    best_losses: str = ""
    """Losses of both arms at their best learning rates, in a study with `lr_sweep`."""
    same_size: str = ""
    """Whether both arms have equally many parameters, if the metric is the held-out loss."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Lower and upper one-sided bounds of the gap, each with confidence 1 - alpha.

        The bounds end at the possible values. None if the gap has no standard error.
        """
        if self.gap is None:
            return None
        # Both ends of this two-sided interval are one-sided bounds with confidence 1 - alpha.
        interval = self.gap.interval(1 - 2 * self.rule.alpha)
        if interval is None:
            return None
        low, high = interval
        return max(low, -self.largest_gap), min(high, self.largest_gap)


def rule_test(study: Study, rule: Rule, arms: Mapping[str, StudyArm]) -> RuleTest:
    """Compute all tests of a rule; a rule of a removed kind is never shown or refuted."""
    candidate = arms[rule.arm]
    base = arms[rule.against]
    outcome = gap_of_rule(study, rule, arms)
    if replacement_of(study, rule):
        return RuleTest(rule=rule, outcome=outcome, showing=NEVER, refuting=NEVER)
    gap = times = None
    if rule.kind == "log_rank":
        level = rule.reaches or 0.0
        times = candidate.times(level), base.times(level)
        sides, smallest = log_rank_tests(*times)
    else:
        gap = outcome.full
        sides, smallest = t_tests(rule, gap, np.array(outcome.differences))
    # Diverged runs have no value, so their test replaces the tests of the remaining values.
    sides = sides_of_diverged(study, rule, outcome) or sides
    notes = {}
    if rule.kind in ("difference", "equivalence"):
        notes = value_notes(study, candidate, base)
        if study.lr_sweep:
            # A seed has one run per learning rate, and a value if one of these runs is finite. The
            # shares of `arm_gap` count seeds; the shares of all runs replace them.
            candidate_share = Share(candidate.diverged, len(candidate.runs))
            base_share = Share(base.diverged, len(base.runs))
            outcome = replace(outcome, candidate=candidate_share, base=base_share)
            sides = sides_of_sensitivity(rule, sides, outcome)
    undocumented = []
    for run in (*candidate.runs, *base.runs):
        if run.seed in outcome.undocumented and run.documents is None:
            undocumented.append(run.name)
    low, high = study.limits
    return RuleTest(
        rule=rule,
        outcome=outcome,
        gap=gap,
        largest_gap=math.inf if rule.kind == "trend" else high - low,
        times=times,
        showing=sides[0],
        refuting=sides[1],
        smallest=smallest,
        undocumented=undocumented,
        **notes,
    )


def value_notes(study: Study, candidate: StudyArm, base: StudyArm) -> dict[str, str]:
    """Return the fields `chance`, `same_size` and `best_losses` of `RuleTest` that apply."""
    notes = {"chance": floor_or_ceiling(study, candidate, base)}
    if study.metric == "heldout_loss":
        notes["same_size"] = size_words(candidate, base)
    if study.lr_sweep:
        notes["best_losses"] = best_losses(candidate, base)
    return notes


def gap_of_rule(study: Study, rule: Rule, arms: Mapping[str, StudyArm]) -> ArmGap:
    """Return the gap of the study's metric, or of its slopes over parameters in a trend rule.

    A gap of held-out losses includes the error over documents.
    """
    if rule.over == PARAMETERS:
        return arm_gap(*slopes(rule, arms))
    is_log = study.scale == "log"
    return arm_gap(arms[rule.arm], arms[rule.against], is_log)


def log_rank_tests(candidate: Times, base: Times) -> tuple[tuple[Side, Side], float]:
    """Return log-rank tests of a rule's claim and of the opposite claim, and their smallest p."""
    sides = Side(), Side()
    runs = len(candidate.tokens)
    base_runs = len(base.tokens)
    if runs > 1 and base_runs > 1:
        showing = Side(log_rank(candidate, base))
        refuting = Side(log_rank(base, candidate))
        sides = showing, refuting
    return sides, smallest_p("log_rank", runs, base_runs)


def t_tests(
    rule: Rule, gap: Gap | None, differences: np.ndarray
) -> tuple[tuple[Side, Side], float]:
    """Return the tests of a rule's claim and of the opposite claim, and the smallest exact p.

    Each test is a t test with an exact sign-flip test. Without an error of the gap, all p-values
    are None.

    Args:
        differences: value of the first arm minus value of the second arm, shape (seeds,).
    """
    if gap is None or gap.error is None:
        return (Side(), Side()), 1.0
    smallest = smallest_p("paired", gap.seeds, gap.seeds)

    def side(direction: int, bound: float) -> Side:
        p = gap.p_below(bound) if direction == BELOW else gap.p_above(bound)
        return Side(p, sign_flip(direction * (differences - bound)))

    if rule.kind != "equivalence":
        direction, bound = side_of(rule)
        return (side(direction, bound), side(-direction, bound)), smallest
    margin = rule.margin or 0.0
    # The claim holds if the gap is below the margin and above its negative, so the larger p counts.
    showing = combined(side(BELOW, margin), side(ABOVE, -margin), max, 1)
    # Either side refutes the claim. Bonferroni's factor 2 corrects the choice of the smaller p.
    refuting = combined(side(ABOVE, margin), side(BELOW, -margin), min, 2)
    close = equivalence(gap, margin, rule.alpha)
    if gap.zero_variance and close and close.inside:
        # Without variance no t test has a p.
        showing = Side(0.0, showing.exact)
    return (showing, refuting), smallest


def combined(first: Side, second: Side, choose: Callable[[Any, Any], Any], tests: int) -> Side:
    """Combine two tests: max if both alternatives must hold, min of two tests if one must."""
    p = min(1.0, tests * choose(first.p, second.p))
    exact = min(1.0, tests * choose(first.exact, second.exact))
    return Side(p, exact, tests=tests)


def side_of(rule: Rule) -> tuple[int, float]:
    """Return the side of the claimed gap, BELOW or ABOVE a bound, and the bound."""
    if rule.below is not None:
        return BELOW, rule.below
    return ABOVE, rule.above or 0.0


def sides_of_diverged(study: Study, rule: Rule, outcome: ArmGap) -> tuple[Side, Side] | None:
    """Return p-values for diverged runs, which t tests ignore; None if the values decide.

    If the shares of diverged runs differ, nothing is shown or refuted, because the missing values
    could reverse the result. There is one exception: all runs of one arm and no run of the other
    diverged. The p-value of this outcome then decides that the diverged arm is worse.
    """
    candidate = outcome.candidate
    base = outcome.base
    is_equivalence = rule.kind == "equivalence"
    is_any_diverged = candidate.diverged + base.diverged > 0
    # Products of whole numbers compare the shares without rounding.
    is_equal = candidate.diverged * base.runs == base.diverged * candidate.runs
    if not is_any_diverged or (is_equal and not is_equivalence):
        return None
    worse, other = base, candidate
    if candidate.diverged:
        worse, other = candidate, base
    # A trend has no better arm, and neither have some metrics. A log-rank rule claims that
    # `candidate` is better.
    claimed_direction, _ = side_of(rule)
    better_direction = better(study.metric)
    if rule.kind == "log_rank":
        claimed_direction = better_direction = ABOVE
    elif rule.kind == "trend":
        better_direction = 0
    is_partial = worse.diverged < worse.runs or other.diverged > 0
    if is_partial or not (better_direction or is_equivalence):
        return NEVER, NEVER
    p = p_all_against_none(worse.runs, other.runs)
    if is_equivalence:
        # The claim names no worse arm, so the test has two sides.
        p = min(1.0, 2 * p)
    decided = Side(p, p, diverged=True)
    claims_better = claimed_direction == better_direction
    if is_equivalence or claims_better == (worse is candidate):
        return NEVER, decided
    return decided, NEVER


def sides_of_sensitivity(
    rule: Rule, sides: tuple[Side, Side], outcome: ArmGap
) -> tuple[Side, Side]:
    """Return p-values of a rule about learning rate sensitivity, with diverged runs of all rates.

    An arm with a larger share of diverged runs is never shown to be less sensitive, because an arm
    that learns at no learning rate has a small sensitivity. The shares themselves are not tested,
    because runs of one seed are not independent.
    """
    showing, refuting = sides
    candidate = outcome.candidate
    base = outcome.base
    # The difference of both shares, times both numbers of runs.
    excess = candidate.diverged * base.runs - base.diverged * candidate.runs
    if not excess:
        return sides
    claims_less_sensitive = side_of(rule)[0] == BELOW
    diverges_more = excess > 0
    if rule.kind == "equivalence" or claims_less_sensitive == diverges_more:
        return NEVER, refuting
    return showing, NEVER


def floor_or_ceiling(study: Study, candidate: StudyArm, base: StudyArm) -> str:
    """Describe a ceiling effect (both accuracies near 1) or floor effect (both at chance level).

    Return "" if there is no such effect, if the metric is not an accuracy on a linear scale, or if
    all runs of an arm diverged.
    """
    runs = (*candidate.runs, *base.runs)
    chances = [run.chance for run in runs if run.chance is not None]
    mean, base_mean = candidate.mean, base.mean
    if not chances or study.scale != "linear" or not (mean and base_mean):
        return ""
    listing = f"{candidate.label} has {mean.mean:.3f} and {base.label} has {base_mean.mean:.3f}"
    if mean.mean >= CEILING and base_mean.mean >= CEILING:
        return f"all arms are at the ceiling: {listing}"
    chance = max(chances)
    # A single seed has no interval; its mean is compared.
    low = mean.mean if mean.low is None else mean.low
    base_low = base_mean.mean if base_mean.low is None else base_mean.low
    if low <= chance and base_low <= chance:
        return f"no arm is above chance ({chance:.3f}) with 95% confidence: {listing}"
    return ""


def best_losses(candidate: StudyArm, base: StudyArm) -> str:
    """Name the arm with the higher loss at its best learning rate.

    An arm with equally high losses at all learning rates has a small sensitivity.
    """
    loss = best_loss(candidate)
    base_loss = best_loss(base)
    if math.inf in (loss, base_loss):
        return ""
    text = (
        f"loss at the best learning rate: {candidate.label} {loss:.4g}, "
        f"{base.label} {base_loss:.4g}"
    )
    if loss == base_loss:
        return text
    worse = candidate if loss > base_loss else base
    return f"{text} ({worse.label} is worse)"


def best_loss(arm: StudyArm) -> float:
    """Return the lowest mean loss over seeds of a learning rate; infinity without such a loss."""
    lowest = math.inf
    for lr in {run.lr for run in arm.runs}:
        losses = []
        for run in arm.runs:
            if run.lr == lr:
                losses.append(math.inf if run.loss is None else run.loss)
        lowest = min(lowest, sum(losses) / len(losses))
    return lowest


def size_words(candidate: StudyArm, base: StudyArm) -> str:
    """State whether two arms have equally many parameters; "" if the numbers are not recorded."""
    if not candidate.runs or not base.runs:
        return ""
    size = candidate.runs[0].facts.parameters
    base_size = base.runs[0].facts.parameters
    if not size or not base_size:
        return ""
    share = size / base_size - 1
    if abs(share) <= TOLERANCE:
        return f"at equal parameters (within {percent(float(TOLERANCE))})"
    word = "more" if share > 0 else "fewer"
    return f"{candidate.label} has {percent(abs(share))} {word} parameters"
