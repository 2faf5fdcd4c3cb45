"""Trends: rules about slopes over parameters, and the trend of the loss gap during training."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from diffllm.compare.arms.sentences import ascii_minus
from diffllm.compare.report.trends import trend_sentence
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.file import Rule, Study
from diffllm.compare.study.trend_data import check_sizes
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

    `x` contains the points: numbers of tokens or of parameters. `own` and `base` map each seed to
    an array of n values, or to None if the seed diverged.
    """

    x: np.ndarray
    own: Curves
    base: Curves


def arms_of_rule(
    study: Study, rule: Rule, arms: Mapping[str, StudyArm]
) -> tuple[StudyArm, StudyArm]:
    """Return the two arms that a rule compares.

    For a trend rule, the value of each seed is the slope of the metric over parameters.
    """
    own, base = arms[rule.arm], arms[rule.against]
    if rule.kind != "trend":
        return own, base
    x, *curves = over_sizes(rule, arms)
    slopes: list[dict[int, float | None]] = []
    for curve in curves:
        slopes.append({seed: slope_of(x, y) for seed, y in curve.items()})
    return StudyArm(own.name, own.lr, values=slopes[0]), StudyArm(
        base.name, base.lr, values=slopes[1]
    )


def slope_of(x: np.ndarray, y: np.ndarray | None) -> float | None:
    return None if y is None else fit_line(x, y).slope


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


def along_training(own: StudyArm, base: StudyArm) -> Sides:
    """Return the held-out loss of two arms at the training tokens that all their runs evaluated.

    The result contains None for the seeds of diverged runs.
    """
    runs = [run for arm in (own, base) for run in arm.runs if not run.diverged]
    x, losses = common_points([run.curve for run in runs], WINDOW)
    by_name = {run.name: y for run, y in zip(runs, losses, strict=True)}
    first, second = ({run.seed: by_name.get(run.name) for run in arm.runs} for arm in (own, base))
    return Sides(x, first, second)


def loss_trend(study: Study, arms: Mapping[str, StudyArm]) -> str:
    """Return a sentence about how the loss gap of the first rule's arms changes during training.

    Return "" if the metric is not heldout_loss on a linear scale, or if the runs have too few
    common evaluations. Also return "" if the first rule is a trend rule: its one-sided test could
    contradict the two-sided confidence interval in the sentence.
    """
    rule = study.rule
    if study.metric != "heldout_loss" or study.scale != "linear" or rule.over:
        return ""
    x, *both = along_training(arms[rule.arm], arms[rule.against])
    own, base = ({seed: y for seed, y in side.items() if y is not None} for side in both)
    if len(x) < FEWEST_POINTS:
        return ""
    found = gap_trend(x, own, base, paired)
    return ascii_minus(trend_sentence(rule.arm, rule.against, found)) if found else ""
