"""Read losses by position, and check the arms of trends over parameters."""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from diffllm.compare.arms.comparable import Comparand, Terms, differences
from diffllm.compare.arms.run import Run
from diffllm.compare.study.file import PARAMETERS, POSITION, Rule, Study
from diffllm.compare.study.unequal import allowed_names, difference_words
from diffllm.config import TrainConfig
from diffllm.config.matching import totals
from diffllm.core.errors import ConfigError, listed
from diffllm.evaluation.evaluation import all_results, question_of
from diffllm.evaluation.position import DOCUMENTS
from diffllm.metrics.records import finite


class PositionLosses(NamedTuple):
    """Mean losses by token position, measured by `diffllm evaluate tasks=[position]`.

    Positions in the document are grouped into n octaves, which begin at positions 1, 2, 4, ...
    """

    positions: list[float]
    """First position of each octave. Position 0 is omitted: it has no logarithm."""
    position_losses: list[float | None]
    """Mean loss of each octave in nats per token; None if the loss is not finite."""
    position_settings: str
    """JSON that identifies the documents, corpus and tokenizer. It must be equal for all runs."""


def position_losses(run: Run) -> PositionLosses:
    """Read the losses by position that `diffllm evaluate` measured at the last step of a run.

    Raises ConfigError if the results of the task `position` at this step are missing or damaged.
    """
    problems: dict[str, list[str]] = {}
    results = all_results(run.path, problems, run.cfg.steps).get(run.cfg.steps, {})
    result = results.get(POSITION)
    if result is None:
        note = ""
        for reason, files in problems.items():
            if f"{POSITION}.jsonl" in files[0]:
                note = f" ({reason})"
                break
        command = shlex.join(["diffllm", "evaluate", f"run={run.path}", f"tasks=[{POSITION}]"])
        raise ConfigError(
            f"{run.path} has no results of the task {POSITION} at the last step{note}; "
            f"run: {command}"
        )
    octaves: dict[float, float | None] = {}
    for score in result["scores"]:
        start = finite((score.get("level") or {}).get(POSITION))
        if start:  # 0 and scores without a position are omitted.
            octaves[start] = finite(score["value"])
    positions = sorted(octaves)
    losses = [octaves[position] for position in positions]
    return PositionLosses(positions, losses, json.dumps(question_of(result)))


def unequal_positions(settings: Collection[str]) -> list[str]:
    """Return why losses by position cannot be compared; `settings` are those of the runs.

    The documents and their length must follow from the study: settings of the evaluation command
    could be chosen after the runs.
    """
    problems = []
    for text in sorted(settings):
        chosen = json.loads(text)
        if "seq_len" in chosen or chosen.get("documents") != DOCUMENTS:
            problems.append(
                f"losses by {POSITION}: a run was evaluated with limit=N or seq_len=N; repeat "
                f"`diffllm evaluate tasks=[{POSITION}]` without these settings for all runs"
            )
            break
    if len(settings) > 1:
        problems.append(f"losses by {POSITION}: runs were evaluated on different documents")
    return problems


def check_trends(study: Study, configs: Mapping[str, TrainConfig]) -> None:
    """Raise ConfigError if the arms of a trend over parameters have unsuitable sizes."""
    parameters = {arm: totals(cfg.model)["params"] for arm, cfg in configs.items()}
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
        listing += [f"{arm} {parameters[arm]:,.0f}" for arm in pair]
    ordered = sorted(sizes)
    is_overlapping = any(small[1] >= large[0] for small, large in pairwise(ordered))
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
        arms = [arm for pair in rule.pairs for arm in pair]
        texts = []
        for difference in differences([run for run in runs if run.arm in arms], terms):
            if difference.role == "condition":
                texts.append(difference_words(difference))
        if texts:
            problems.append(
                f"trend over {PARAMETERS}: arms differ in {listed(texts)}, but the arms of a trend "
                "may differ only in the attention variant and in their sizes"
            )
    return problems
