"""Trend rules: compare two arms by the slope of the metric over tokens, positions or parameters."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from diffllm.compare.report.numbers import ascii_minus
from diffllm.compare.report.trends import trend_sentence
from diffllm.compare.study.arms import StudyArm, StudyRun
from diffllm.compare.study.file import PARAMETERS, POSITION, TOKENS, Rule, Study
from diffllm.compare.study.trend_data import PositionLosses, check_same_documents, check_sizes
from diffllm.core.errors import ConfigError
from diffllm.metrics.records import finite
from diffllm.statistics.gap_tests import paired
from diffllm.statistics.trend import (
    FEWEST_POINTS,
    WINDOW,
    common_points,
    fit_line,
    gap_trend,
)

Curves = dict[int, np.ndarray | None]
"""Values of each seed at the common points, (n,); None for a diverged run."""


class Sides(NamedTuple):
    """Metric values of two arms at the same n points.

    `x` contains the points: numbers of tokens, positions, or numbers of parameters. `own` and
    `base` map each seed to an array of n values, or to None if the seed diverged.
    """

    x: np.ndarray
    own: Curves
    base: Curves


def arms_of_rule(
    study: Study, rule: Rule, arms: Mapping[str, StudyArm]
) -> tuple[StudyArm, StudyArm]:
    """Return the two arms that a rule compares.

    For a trend rule, the value of each seed is the slope of the metric over tokens, positions or
    parameters. Raises ConfigError if the runs have fewer than FEWEST_POINTS common points.
    """
    own, base = arms[rule.arm], arms[rule.against]
    if rule.kind != "trend":
        return own, base
    x, *curves = sides(study, rule, arms)
    finite = [any(y is not None for y in side.values()) for side in curves]
    if all(finite) and len(x) < FEWEST_POINTS:
        raise ConfigError(
            f"trend of {own.name} and {base.name} over {rule.over}: all runs have finite values at "
            f"only {len(x)} common points, but a trend needs at least {FEWEST_POINTS}; evaluate "
            "all runs at more points, which must be the same in each run"
        )
    enough = len(x) >= FEWEST_POINTS
    first, second = (
        {
            seed: None if y is None else fit_line(x, y).slope
            for seed, y in side.items()
            if y is None or enough
        }
        for side in curves
    )
    return StudyArm(own.name, own.lr, values=first), StudyArm(base.name, base.lr, values=second)


def sides(study: Study, rule: Rule, arms: Mapping[str, StudyArm]) -> Sides:
    if rule.over == PARAMETERS:
        return over_sizes(rule, arms)
    return along_runs(study, rule.over or TOKENS, arms[rule.arm], arms[rule.against])


def over_sizes(rule: Rule, arms: Mapping[str, StudyArm]) -> Sides:
    """Return the metric of two arms at several model sizes.

    For each size, `x` contains the geometric mean of both arms' parameter counts. A seed is
    included only if its runs ended at every size.
    """
    named = {name: arms[name] for pair in rule.pairs for name in pair}
    parameters = {name: parameters_of(arm) for name, arm in named.items() if arm.runs}
    if len(parameters) < len(named):
        return Sides(np.zeros(0), {}, {})
    check_sizes(rule, parameters)
    pairs = sorted(rule.pairs, key=lambda pair: parameters[pair[0]])
    found: list[Curves] = []
    for side in zip(*pairs, strict=True):
        values = [named[name].values for name in side]
        seeds = sorted(set.intersection(*map(set, values)))
        of_seed = {seed: [each[seed] for each in values] for seed in seeds}
        found.append({seed: None if None in y else np.array(y) for seed, y in of_seed.items()})
    return Sides(
        np.array([math.sqrt(parameters[own] * parameters[base]) for own, base in pairs]), *found
    )


def parameters_of(arm: StudyArm) -> float:
    count = finite(arm.runs[0].facts.parameters)
    if not count or count <= 0:
        raise ConfigError(
            f"{arm.runs[0].name}: run.json does not contain the number of parameters; "
            "train this run again from the start"
        )
    return count


def along_runs(study: Study, over: str, own: StudyArm, base: StudyArm) -> Sides:
    """Return the metric of two arms at the points that all runs without divergence have in common.

    If `over` is "tokens", the points are numbers of training tokens. If `over` is "position", they
    are positions in the document. The result contains None for the seeds of diverged runs.
    """
    runs = [run for arm in (own, base) for run in arm.runs if not run.diverged]
    if over == POSITION:
        x, values = at_positions([run.positions for run in runs if run.positions])
    else:
        x, values = common_points([run.curve for run in runs], WINDOW)
    by_run = {run.name: on_scale(y, run, study) for run, y in zip(runs, values, strict=True)}
    first, second = ({run.seed: by_run.get(run.name) for run in arm.runs} for arm in (own, base))
    return Sides(x, first, second)


def at_positions(losses: list[PositionLosses]) -> tuple[np.ndarray, list[np.ndarray]]:
    check_same_documents(losses)
    return common_points([(each.positions, each.losses) for each in losses])


def on_scale(values: np.ndarray, run: StudyRun, study: Study) -> np.ndarray:
    if study.scale == "linear":
        return values
    if (values <= 0).any():
        raise ConfigError(
            f"{run.name}: {study.metric}={values.min():g} must be above 0 with scale=log; "
            "use scale=linear"
        )
    return np.log(values)


def loss_trend(study: Study, arms: Mapping[str, StudyArm]) -> str:
    """Return a sentence about how the loss gap of the first rule's arms changes during training.

    Return "" if the metric is not heldout_loss on a linear scale, or if the runs have too few
    common evaluations. Also return "" if the first rule is a trend rule: its one-sided test could
    contradict the two-sided confidence interval in the sentence.
    """
    rule = study.rule
    if study.metric != "heldout_loss" or study.scale != "linear" or rule.over:
        return ""
    x, *both = along_runs(study, TOKENS, arms[rule.arm], arms[rule.against])
    own, base = ({seed: y for seed, y in side.items() if y is not None} for side in both)
    if len(x) < FEWEST_POINTS:
        return ""
    found = gap_trend(x, own, base, paired)
    return ascii_minus(trend_sentence(rule.arm, rule.against, found)) if found else ""
