"""Rules about trends over parameters: the slopes of both arms, and the checks of their sizes."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise

import numpy as np

from diffllm.compare.arms.arm import Arm
from diffllm.compare.arms.comparability import Comparand, Terms, differences
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.declared_differences import allowed_names, difference_words
from diffllm.compare.study.file import PARAMETERS, Rule, Study
from diffllm.config import TrainConfig
from diffllm.config.matching import totals
from diffllm.core.errors import ConfigError, listed
from diffllm.core.run_files import finite
from diffllm.statistics.trend import fit_line


def slopes(rule: Rule, arms: Mapping[str, StudyArm]) -> tuple[Arm[int], Arm[int]]:
    """Return both sides of a trend rule over parameters, with slopes as their values.

    A value is the slope of the metric per doubling of parameters, or None if a run of the seed
    diverged. The number of parameters of a size is the geometric mean of both arms. A seed is
    included only if its runs ended at every size.
    """
    candidates: list[StudyArm] = []
    bases: list[StudyArm] = []
    for candidate_name, base_name in rule.pairs:
        candidates.append(arms[candidate_name])
        bases.append(arms[base_name])
    if not all(arm.runs for arm in candidates + bases):
        return Arm(rule.arm, {}), Arm(rule.against, {})
    parameters = {arm.label: parameters_of(arm) for arm in candidates + bases}
    # `check_trends` compared the planned sizes before the runs; these are the recorded sizes.
    check_sizes(rule, parameters)
    sizes = []
    for candidate_name, base_name in rule.pairs:
        product = parameters[candidate_name] * parameters[base_name]
        sizes.append(math.sqrt(product))
    candidate_slopes = slopes_by_seed(sizes, candidates)
    base_slopes = slopes_by_seed(sizes, bases)
    return Arm(rule.arm, candidate_slopes), Arm(rule.against, base_slopes)


def slopes_by_seed(sizes: list[float], arms: list[StudyArm]) -> dict[int, float | None]:
    """Return the slope of the metric over `sizes`, the numbers of parameters of `arms`."""
    common_seeds = set(arms[0].seed_values)
    for arm in arms:
        common_seeds.intersection_update(arm.seed_values)
    by_seed: dict[int, float | None] = {}
    for seed in sorted(common_seeds):
        values = [arm.seed_values[seed] for arm in arms]
        by_seed[seed] = None
        if None not in values:
            line = fit_line(np.array(sizes), np.array(values))
            by_seed[seed] = line.slope
    return by_seed


def parameters_of(arm: StudyArm) -> float:
    # All runs of an arm have one model size.
    count = finite(arm.runs[0].facts.parameters)
    if not count or count <= 0:
        raise ConfigError(
            f"{arm.runs[0].name}: run.json does not contain the number of parameters; "
            "train this run again from the start"
        )
    return count


def check_trends(study: Study, configs: Mapping[str, TrainConfig]) -> None:
    """Raise ConfigError if the arms of a trend over parameters have unsuitable sizes."""
    parameters = {}
    for arm, cfg in configs.items():
        parameters[arm] = totals(cfg.model)["params"]
    for rule in study.rules:
        if rule.over == PARAMETERS:
            check_sizes(rule, parameters)


def check_sizes(rule: Rule, parameters: Mapping[str, float]) -> None:
    """Raise ConfigError unless the pairs of a trend over parameters have different sizes.

    Both arms of a pair must be larger than both arms of each smaller pair. The pair of `rule.arm`
    and `rule.against` must be the largest.

    Args:
        parameters: number of parameters by arm.
    """
    sizes = []
    listing = []
    for pair in rule.pairs:
        sizes.append(sorted(parameters[arm] for arm in pair))
        for arm in pair:
            listing.append(f"{arm} {parameters[arm]:,.0f}")
    ordered = sorted(sizes)
    is_overlapping = False
    for smaller_pair, larger_pair in pairwise(ordered):
        if smaller_pair[1] >= larger_pair[0]:
            is_overlapping = True
    if is_overlapping or ordered[-1] != sizes[-1]:
        raise ConfigError(
            f"trend over {PARAMETERS}: the pairs of arms must have different numbers of parameters "
            f"({', '.join(listing)}), and {rule.arm} must be in the largest pair; change the sizes "
            "of these arms"
        )


def unequal_pairs(study: Study, runs: Sequence[Comparand]) -> list[str]:
    """Return the differences between the arms of trends over parameters, except in their sizes.

    The key `unequal` of a study declares differences between sizes, but also allows them within a
    pair. A trend would then compare, for example, numbers of tokens instead of sizes.
    """
    terms = Terms("study", allowed_names(["parameters", "flops"]), study.measures_time)
    problems = []
    for rule in study.rules:
        if rule.over != PARAMETERS:
            continue
        arms = set(chain(*rule.pairs))
        runs_of_rule = [run for run in runs if run.arm in arms]
        texts = []
        for difference in differences(runs_of_rule, terms):
            if difference.role == "condition":
                texts.append(difference_words(difference))
        if texts:
            problems.append(
                f"trend over {PARAMETERS}: arms differ in {listed(texts)}, but the arms of a trend "
                "may differ only in the attention variant and in their sizes"
            )
    return problems
