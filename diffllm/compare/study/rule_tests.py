"""Statistical tests of a study's rules: t tests, permutation tests and tests of diverged runs.

Each rule has two sets of p-values: `showing` for the rule's claim, and `refuting` for the opposite
claim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from diffllm.compare.arms.gap import ArmGap, arm_gap
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.file import Rule, Study, better
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.statistics.divergence import Share, p_all_against_none
from diffllm.statistics.estimates import Times, estimate
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


@dataclass(frozen=True)
class Tested:
    """A rule with its test results and, after `decide`, its verdict.

    `showing` contains p-values for the claim, and `refuting` p-values for the opposite claim.
    """

    rule: Rule
    outcome: ArmGap
    gap: Gap | None = None
    """None for log-rank rules."""
    times: tuple[Times, Times] | None = None
    """None except for log-rank rules."""
    showing: Side = Side()
    refuting: Side = Side()
    undocumented: Sequence[str] = ()
    """Names of runs without losses per document; empty if no run has losses per document."""
    best_losses: str = ""
    """Losses of both arms at their best learning rates, in a study with `lr_sweep`."""
    chance: str = ""
    """Why accuracies near chance or near 1 cannot decide the rule, or "" if they can."""
    smallest: float = 1.0
    """Smallest one-sided p that a permutation test can have with these seeds."""
    adjusted: dict[str, float | None] = field(default_factory=dict)
    """P-values after Holm's correction, such as {"showing": 0.03}."""
    verdict: str = ""
    reason: str = ""

    @property
    def p(self) -> float | None:
        return self.showing.p

    @property
    def p_adjusted(self) -> float | None:
        return self.adjusted.get("showing")

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Lower and upper one-sided bounds of the gap, each with confidence 1 - alpha.

        None if the gap has no standard error.
        """
        return self.gap.interval(1 - 2 * self.rule.alpha) if self.gap else None


def measure(study: Study, rule: Rule, own: StudyArm, base: StudyArm) -> Tested:
    """Compute all tests of a rule, whose claim compares the arm `own` with the arm `base`."""
    outcome = gap_of_arms(study, own, base)
    if rule.kind == "log_rank":
        times = own.times(rule.reaches or 0.0), base.times(rule.reaches or 0.0)
        sizes = len(times[0].tokens), len(times[1].tokens)
        showing, refuting = log_rank(*times), log_rank(*reversed(times))
        if min(sizes) < 2:
            showing = refuting = None
        tested = Tested(rule, outcome, times=times, showing=Side(showing), refuting=Side(refuting))
        return with_divergence(replace(tested, smallest=smallest_p("log_rank", *sizes)), ABOVE)
    gap = outcome.full
    tested = Tested(rule, outcome, gap)
    if gap is not None and gap.error is not None:
        tested = replace(
            tested,
            **t_tests(rule, np.array(outcome.differences), gap),
            smallest=smallest_p("paired", gap.seeds, gap.seeds),
            undocumented=undocumented(outcome, own, base),
        )
    tested = replace(tested, chance=floor_or_ceiling(study, own, base))
    # A trend has no better arm, and the slopes of diverged runs are unknown.
    tested = with_divergence(tested, 0 if rule.kind == "trend" else better(study.metric))
    if study.lr_sweep and rule.kind != "trend":
        shares = [Share(arm.diverged, len(arm.runs)) for arm in (own, base)]
        tested = replace(tested, best_losses=best_losses(own, base))
        return with_diverged_rates(tested, *shares)
    return tested


def best_losses(own: StudyArm, base: StudyArm) -> str:
    """Name the arm with the higher loss at its best learning rate.

    An arm with equally high losses at all learning rates has a small sensitivity.
    """
    losses = best_loss(own), best_loss(base)
    if not all(map(math.isfinite, losses)):
        return ""
    text = (
        f"loss at the best learning rate: {own.name} {losses[0]:.4g}, {base.name} {losses[1]:.4g}"
    )
    if losses[0] == losses[1]:
        return text
    worse = own if losses[0] > losses[1] else base
    return f"{text} ({worse.name} is worse)"


def best_loss(arm: StudyArm) -> float:
    """Return the lowest mean loss over seeds of a learning rate; infinity without such a loss."""
    losses: dict[float, list[float]] = {}
    for run in arm.runs:
        losses.setdefault(run.lr, []).append(math.inf if run.loss is None else run.loss)
    return min((sum(values) / len(values) for values in losses.values()), default=math.inf)


def t_tests(rule: Rule, differences: np.ndarray, gap: Gap) -> dict[str, Any]:
    """Return the fields `showing` and `refuting` of `Tested`.

    The tests are t tests and exact sign-flip tests.

    Args:
        differences: value of the first arm minus value of the second arm, shape (seeds,).
    """

    def side(bound: float, which: int) -> Side:
        p = gap.p_below(bound) if which == BELOW else gap.p_above(bound)
        exact = sign_flip(which * (differences - bound))
        return Side(p, exact)

    if rule.kind == "equivalence":
        margin = rule.margin or 0.0
        inside = combined(side(margin, BELOW), side(-margin, ABOVE), max, 1)
        outside = combined(side(margin, ABOVE), side(-margin, BELOW), min, 2)
        close = equivalence(gap, margin, rule.alpha)
        if gap.zero_variance and close and close.inside:
            # Without variance no t test has a p, but the gap is inside the margin.
            inside = replace(inside, p=0.0)
        return {"showing": inside, "refuting": outside}
    which, bound = side_of(rule)
    return {"showing": side(bound, which), "refuting": side(bound, -which)}


def combined(first: Side, second: Side, choose: Callable[..., float], factor: int) -> Side:
    """Combine two tests: each p-value is `factor` * choose(p of `first`, p of `second`), at most 1.

    If `choose` is max and `factor` is 1, the alternative hypothesis of the result is "both
    alternatives hold". If `choose` is min and `factor` is 2, it is "at least one alternative
    holds". A p-value is None if it is None in `first` or `second`.
    """

    def of(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else min(1.0, factor * choose(a, b))

    return Side(
        of(first.p, second.p),
        of(first.exact, second.exact),
        tests=factor,
    )


def side_of(rule: Rule) -> tuple[int, float]:
    """Return the side of the claimed gap, BELOW or ABOVE a bound, and the bound."""
    return (BELOW, rule.below) if rule.below is not None else (ABOVE, rule.above or 0.0)


def gap_of_arms(study: Study, own: StudyArm, base: StudyArm) -> ArmGap:
    """Return the gap of the study's metric; a held-out loss includes the error over documents."""
    own_documents, base_documents = documents_of(study, own), documents_of(study, base)
    is_log = study.scale == "log"
    return arm_gap(own.values, base.values, own_documents, base_documents, is_log)


def documents_of(study: Study, arm: StudyArm) -> dict[int, DocumentLosses | None]:
    if study.metric != "heldout_loss":
        return {}
    return {run.seed: run.documents for run in arm.runs}


def undocumented(gap: ArmGap, *arms: StudyArm) -> list[str]:
    runs = [run for arm in arms for run in arm.runs if run.seed in gap.undocumented]
    return [run.name for run in runs if run.documents is None]


def floor_or_ceiling(study: Study, own: StudyArm, base: StudyArm) -> str:
    """Describe a ceiling effect (both accuracies near 1) or floor effect (both at chance level).

    Return "" if there is no such effect, if the metric is not an accuracy on a linear scale, or if
    all runs of an arm diverged.
    """
    chances = [run.chance for arm in (own, base) for run in arm.runs if run.chance is not None]
    if not chances or study.scale != "linear" or not (own.finite and base.finite):
        return ""
    means = [estimate(arm.finite) for arm in (own, base)]
    names = own.name, base.name
    said = " and ".join(
        f"{name} has {mean.mean:.3f}" for name, mean in zip(names, means, strict=True)
    )
    if all(mean.mean >= CEILING for mean in means):
        return f"all arms are at the ceiling: {said}"
    chance = max(chances)
    if all((mean.mean if mean.low is None else mean.low) <= chance for mean in means):
        return f"no arm is above chance ({chance:.3f}) with 95% confidence: {said}"
    return ""


def with_divergence(tested: Tested, upwards: int) -> Tested:
    """Adjust the p-values of a rule for diverged runs, which t tests ignore.

    If the shares of diverged runs differ, nothing is shown or refuted, because the missing values
    could reverse the result. There is one exception: all runs of one arm and no run of the other
    diverged. The p-value of this outcome then decides that the diverged arm is worse.

    `upwards` is ABOVE if larger metric values are better, BELOW if smaller are better, otherwise 0.
    """
    own, base = tested.outcome.own, tested.outcome.base
    is_equivalence = tested.rule.kind == "equivalence"
    is_equal = own.diverged * base.runs == base.diverged * own.runs
    if not own.diverged + base.diverged or (is_equal and not is_equivalence):
        return tested
    undecided = replace(tested, showing=NEVER, refuting=NEVER)
    worse, other = (own, base) if own.diverged else (base, own)
    if worse.diverged < worse.runs or other.diverged:
        return undecided
    p = p_all_against_none(worse.runs, other.runs)
    if is_equivalence:
        return replace(undecided, refuting=decided_by_divergence(min(1.0, 2 * p)))
    if not upwards:
        return undecided
    favours_own = tested.times is not None or side_of(tested.rule)[0] == upwards
    if favours_own == (worse is own):
        return replace(undecided, refuting=decided_by_divergence(p))
    return replace(undecided, showing=decided_by_divergence(p))


def decided_by_divergence(p: float) -> Side:
    return Side(p, p, diverged=True)


def with_diverged_rates(tested: Tested, own: Share, base: Share) -> Tested:
    """Adjust the p-values of a rule about learning rate sensitivity for diverged runs of both arms.

    An arm with a larger share of diverged runs is never shown to be less sensitive, because an arm
    that learns at no learning rate has a small sensitivity. The shares themselves are not tested,
    because runs of one seed are not independent.
    """
    tested = replace(tested, outcome=replace(tested.outcome, own=own, base=base))
    more = own.diverged * base.runs - base.diverged * own.runs
    if not more:
        return tested
    if tested.rule.kind == "equivalence" or (side_of(tested.rule)[0] == BELOW) == (more > 0):
        return replace(tested, showing=NEVER)
    return replace(tested, refuting=NEVER)
