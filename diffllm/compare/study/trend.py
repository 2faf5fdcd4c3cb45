"""Trends: rules about slopes over parameters, and the trend of the loss gap during training."""

import math
from collections.abc import Mapping

import numpy as np

from diffllm.compare.arms.arm import Arm
from diffllm.compare.arms.sentences import ascii_minus
from diffllm.compare.arms.trend import loss_trend, trend_sentence
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.file import Rule, Study
from diffllm.compare.study.trend_data import check_sizes
from diffllm.core.errors import ConfigError
from diffllm.metrics.records import finite
from diffllm.statistics.trend import fit_line


def slopes(rule: Rule, arms: Mapping[str, StudyArm]) -> tuple[Arm[int], Arm[int]]:
    """Return both sides of a trend rule over parameters, with slopes as their values.

    A value is the slope of the metric per doubling of parameters, or None if a run of the seed
    diverged. The number of parameters of a size is the geometric mean of both arms. A seed is
    included only if its runs ended at every size.
    """
    candidate_arms = [arms[candidate] for candidate, _ in rule.pairs]
    base_arms = [arms[base] for _, base in rule.pairs]
    all_arms = candidate_arms + base_arms
    if not all(arm.runs for arm in all_arms):
        return Arm(rule.arm, {}), Arm(rule.against, {})
    parameters = {arm.label: parameters_of(arm) for arm in all_arms}
    check_sizes(rule, parameters)
    sizes = [math.sqrt(parameters[candidate] * parameters[base]) for candidate, base in rule.pairs]
    candidate, base = side_slopes(sizes, candidate_arms), side_slopes(sizes, base_arms)
    return Arm(rule.arm, candidate), Arm(rule.against, base)


def side_slopes(sizes: list[float], arms: list[StudyArm]) -> dict[int, float | None]:
    """Return the slope of the metric over `sizes`, the numbers of parameters of `arms`."""
    seeds = set.intersection(*(set(arm.seed_values) for arm in arms))
    by_seed: dict[int, float | None] = {}
    for seed in sorted(seeds):
        values = [arm.seed_values[seed] for arm in arms]
        by_seed[seed] = None
        if None not in values:
            by_seed[seed] = fit_line(np.array(sizes), np.array(values)).slope
    return by_seed


def parameters_of(arm: StudyArm) -> float:
    count = finite(arm.runs[0].facts.parameters)
    if not count or count <= 0:
        raise ConfigError(
            f"{arm.runs[0].name}: run.json does not contain the number of parameters; "
            "train this run again from the start"
        )
    return count


def study_trend_sentence(study: Study, arms: Mapping[str, StudyArm]) -> str:
    """Return a sentence about how the loss gap of the first rule's arms changes during training.

    Return "" if the metric is not heldout_loss on a linear scale, if the runs have too few common
    evaluations, or if they train on different numbers of tokens: after equal tokens, their learning
    rates then differ. Also return "" if the first rule is a trend rule: its one-sided test could
    contradict the two-sided confidence interval in the sentence.
    """
    rule = study.rule
    if study.metric != "heldout_loss" or study.scale != "linear" or rule.over:
        return ""
    trend = loss_trend(arms[rule.arm], arms[rule.against])
    return ascii_minus(trend_sentence(rule.arm, rule.against, trend)) if trend else ""
