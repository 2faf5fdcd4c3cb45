"""Held-out loss gaps between arms, each measured in three ways.

The first gap is at equal tokens, the second at equal parameters, the third at equal training FLOPs.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diffllm.compare.report.curves import increasing, last_common, read_curve
from diffllm.compare.report.numbers import MISSING, compact, percent, with_interval
from diffllm.compare.report.runs import Series
from diffllm.compare.study.arms import StudyArm, StudyRun, on_scale
from diffllm.compare.study.file import Rule, Study
from diffllm.config.matching import TOLERANCE
from diffllm.core.errors import ConfigError
from diffllm.core.printing import Table
from diffllm.statistics.arm_comparison import compare_arms
from diffllm.statistics.estimates import Estimate

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class AtFlops:
    """Two arms with metric values that are interpolated at `flops` training FLOPs per run.

    `error` is the estimated interpolation error of the gap `own` minus `base`; inf if unknown.
    """

    own: StudyArm
    base: StudyArm
    flops: float
    error: float


@dataclass(frozen=True)
class EqualGaps:
    """Three held-out loss gaps of the same two arms: `arm` minus `against`, in nats per token.

    `tokens`, `parameters` and `flops` are the gaps at equal training tokens, equal parameters and
    equal training FLOPs. A string states why the gap was not measured. `at_flops` is the number of
    FLOPs per run at which the losses for the gap `flops` were interpolated. `error` is the
    estimated interpolation error of this gap. `at_flops` and `error` are None if unknown.
    """

    arm: str
    against: str
    tokens: Estimate | str
    parameters: Estimate | str
    flops: Estimate | str
    at_flops: float | None = None
    error: float | None = None

    def numbers(self) -> dict[str, Any]:
        gaps = {name: getattr(self, name) for name in ("tokens", "parameters", "flops")}
        return {
            "arm": self.arm,
            "against": self.against,
            **{f"at_{name}": gap if isinstance(gap, str) else vars(gap)
               for name, gap in gaps.items()},
            "flops": self.at_flops,
            "interpolation_error": self.error,
        }  # fmt: skip


def arms_at_budget(
    study: Study, rule: Rule, own: StudyArm, base: StudyArm
) -> tuple[StudyArm, StudyArm]:
    """Return both arms with the values that the rule compares.

    If the rule has at=flops, the values are interpolated at equal training FLOPs; raises
    ConfigError if interpolation is impossible. Without at=flops, the arms are unchanged. They are
    also unchanged if no seed can be compared; the numbers of diverged runs may then decide the
    rule.
    """
    if rule.at != "flops" or not seeds_compared(study, own, base):
        return own, base
    found = at_equal_flops(study, own, base)
    if isinstance(found, str):
        raise ConfigError(
            f"cannot compare {rule.arm} with {rule.against} at equal FLOPs: {found}; use at=tokens"
        )
    return found.own, found.base


def seeds_compared(study: Study, own: StudyArm, base: StudyArm) -> set[int]:
    """Return the seeds whose values are used by the study's test.

    A paired test uses seeds with a finite value in both arms. A Welch test uses seeds with a finite
    value in at least one arm. The set is empty if one of the arms has no finite value.
    """
    if study.test == "paired":
        return own.known.keys() & base.known.keys()
    return own.known.keys() | base.known.keys() if own.known and base.known else set()


def at_equal_flops(study: Study, own: StudyArm, base: StudyArm) -> AtFlops | str:
    """Interpolate the metric at the largest number of training FLOPs that all runs reached.

    Diverged runs are ignored, and the values of their seeds remain None. If interpolation is
    impossible, return a string that states why.
    """
    seeds = seeds_compared(study, own, base)
    if not seeds:
        return "no pair of runs"
    finite = [run for arm in (own, base) for run in arm.runs if run.seed in arm.known]
    curves: dict[str, Series] = {}
    for run in finite:
        if (curve := flops_curve(run)) is None:
            return f"{run.name} has no curve of {study.metric} over known training FLOPs"
        curves[run.name] = curve
    compared = [run for run in finite if run.seed in seeds]
    flops = last_common(curves[run.name] for run in compared)
    if flops is None:
        return "a run ends before the first evaluation of another"
    readings = {name: read_curve(curve, flops) for name, curve in curves.items()}
    values = {name: value for name, (value, _) in readings.items()}
    error = math.hypot(
        *(
            float(np.mean([readings[run.name][1] for run in compared if run in arm.runs]))
            for arm in (own, base)
        )
    )
    first, second = (with_values(study, arm, values) for arm in (own, base))
    return AtFlops(first, second, flops, error)


def flops_curve(run: StudyRun) -> Series | None:
    """Return the metric over training FLOPs; None without finite values or known FLOPs."""
    each = run.flops_per_token
    return None if each is None else increasing(run.curve.tokens * each, run.curve.values)


def with_values(study: Study, arm: StudyArm, values: dict[str, float]) -> StudyArm:
    """Return a copy of `arm` with new values; `values` maps run names to the new values.

    The values of diverged seeds remain None. With scale=log, store the logarithm of each value.
    Remove the losses per document, because they were measured at the end of training.
    """
    found: dict[int, float | None] = {}
    for run in arm.runs:
        if run.name in values:
            found[run.seed] = on_scale(values[run.name], run.name, study)
        elif run.seed in arm.values and arm.values[run.seed] is None:
            found[run.seed] = None
    return replace(arm, runs=[replace(run, documents=None) for run in arm.runs], values=found)


def equal_gaps(study: Study, arms: dict[str, StudyArm]) -> list[EqualGaps]:
    """Return one `EqualGaps` for each pair of arms that a rule compares.

    Each contains the loss gap at equal tokens, the gap at equal parameters, and the gap at equal
    FLOPs. The list is empty if the study's metric is not heldout_loss.
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
    found = at_equal_flops(study, own, base)
    if isinstance(found, str):
        return EqualGaps(own.name, base.name, at_tokens, parameters, f"{NOT_MEASURED}: {found}")
    error = found.error if math.isfinite(found.error) else None
    gap = gap_of(study, found.own, found.base)
    return EqualGaps(own.name, base.name, at_tokens, parameters, gap, found.flops, error)


def gap_of(study: Study, own: StudyArm, base: StudyArm) -> Estimate | str:
    outcome = compare_arms(own.values, base.values)
    gap = outcome.paired if study.test == "paired" else outcome.welch
    if gap is None:
        return f"{NOT_MEASURED}: no seed ended finite in both arms"
    low, high = gap.interval(1 - 2 * study.rule.alpha) or (None, None)
    return Estimate(gap.mean, low, high, gap.seeds)


def equal_gaps_table(gaps: list[EqualGaps]) -> Table:
    heads = ("arm minus arm", "equal tokens", "equal parameters", "equal training FLOPs", "FLOPs")
    rows = []
    for each in gaps:
        cells = [
            gap if isinstance(gap, str) else with_interval(gap, signed=True, digits=4)
            for gap in (each.tokens, each.parameters, each.flops)
        ]
        flops = MISSING if each.at_flops is None else compact(each.at_flops)
        rows.append([f"{each.arm} − {each.against}", *cells, flops])
    return Table.of(heads, rows, left=range(len(heads)))


def interpolation_words(gaps: list[EqualGaps], alpha: float) -> str:
    """Describe the unit, the confidence level and the interpolation error of the loss gaps."""
    errors = [each.error for each in gaps if each.error is not None]
    off = f", which may change a gap by {max(errors):.1g}" if any(errors) else ""
    bounds = f"one-sided {100 * (1 - alpha):g}% bounds by the t test"
    return (
        f"Gaps in held-out loss, nats per token, with {bounds}. Gaps at equal FLOPs use the loss "
        "of the held-out sample (eval/loss), interpolated over the logarithm of FLOPs"
        f"{off}."
    )
