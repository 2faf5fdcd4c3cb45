"""Held-out loss gaps between arms at equal tokens and at equal parameters."""

from dataclasses import dataclass, replace
from typing import Any

from diffllm.compare.arms.sentences import percent, with_interval
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.file import Study
from diffllm.compare.study.rule_tests import gap_of_arms
from diffllm.config.matching import TOLERANCE
from diffllm.core.printing import Table
from diffllm.statistics.estimates import Estimate

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class EqualGaps:
    """Held-out loss gaps of the same two arms: `arm` minus `against`, in nats per token.

    `tokens` and `parameters` are the gaps at equal training tokens and at equal parameters. A
    string states why the gap was not measured.
    """

    arm: str
    against: str
    tokens: Estimate | str
    parameters: Estimate | str

    def numbers(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {"arm": self.arm, "against": self.against}
        for name in ("tokens", "parameters"):
            gap = getattr(self, name)
            numbers[f"at_{name}"] = gap if isinstance(gap, str) else vars(gap)
        return numbers


def equal_gaps(study: Study, arms: dict[str, StudyArm]) -> list[EqualGaps]:
    """Return the gaps of each pair of arms that a rule compares.

    The list is empty if the study's metric is not heldout_loss.
    """
    if study.metric != "heldout_loss":
        return []
    linear = replace(study, scale="linear")
    pairs = dict.fromkeys((rule.arm, rule.against) for rule in study.rules)
    return [equal_gap(linear, in_nats(arms[own]), in_nats(arms[base])) for own, base in pairs]


def in_nats(arm: StudyArm) -> StudyArm:
    return replace(arm, values={run.seed: run.loss for run in arm.runs})


def equal_gap(study: Study, own: StudyArm, base: StudyArm) -> EqualGaps:
    tokens = {run.planned_tokens for arm in (own, base) for run in arm.runs}
    at_tokens: Estimate | str = f"{NOT_MEASURED}: the arms differ in tokens"
    if len(tokens) == 1:
        at_tokens = gap_of(study, own, base)
    sizes = [arm.runs[0].facts.parameters if arm.runs else None for arm in (own, base)]
    if None in sizes:
        parameters: Estimate | str = f"{NOT_MEASURED}: parameters are not recorded"
    elif abs(share := sizes[0] / sizes[1] - 1) > TOLERANCE:  # type: ignore[operator]
        more = "more" if share > 0 else "fewer"
        parameters = f"{NOT_MEASURED}: {own.name} has {percent(abs(share))} {more} parameters"
    else:
        parameters = at_tokens
    return EqualGaps(own.name, base.name, at_tokens, parameters)


def gap_of(study: Study, own: StudyArm, base: StudyArm) -> Estimate | str:
    gap = gap_of_arms(study, own, base).full
    if gap is None:
        return f"{NOT_MEASURED}: no seed ended finite in both arms"
    low, high = gap.interval(1 - 2 * study.rule.alpha) or (None, None)
    return Estimate(gap.mean, low, high, gap.seeds)


def equal_gaps_table(gaps: list[EqualGaps]) -> Table:
    heads = ("arm minus arm", "equal tokens", "equal parameters")
    rows = []
    for equal in gaps:
        row = [f"{equal.arm} − {equal.against}"]
        for gap in (equal.tokens, equal.parameters):
            text = gap if isinstance(gap, str) else with_interval(gap, signed=True, digits=4)
            row.append(text)
        rows.append(row)
    return Table.of(heads, rows, left=range(len(heads)))


def equal_gaps_words(alpha: float) -> str:
    """Describe the unit and the confidence level of the loss gaps."""
    return f"Gaps in held-out loss, nats per token, with one-sided {100 * (1 - alpha):g}% bounds."
