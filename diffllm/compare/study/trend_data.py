"""Read the losses by position for trend rules, and check trend rules before the first run."""

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from diffllm.compare.report.evaluations import question_asked
from diffllm.compare.report.runs import Run
from diffllm.compare.study.file import PARAMETERS, POSITION, TOKENS, Rule, Study
from diffllm.config import TrainConfig
from diffllm.config.matching import totals
from diffllm.core.errors import ConfigError
from diffllm.evaluation.evaluation import all_results
from diffllm.metrics.records import finite
from diffllm.statistics.trend import FEWEST_POINTS, WINDOW


class PositionLosses(NamedTuple):
    """Mean losses by token position, measured by `diffllm evaluate tasks=[position]`.

    Positions in the document are grouped into n octaves, which begin at positions 1, 2, 4, ...
    """

    positions: np.ndarray
    """First position of each octave, shape (n,). Position 0 is omitted: it has no logarithm."""
    losses: np.ndarray
    """Mean loss of each octave in nats per token, shape (n,); NaN if the loss is not finite."""
    settings: str
    """JSON that identifies the documents, corpus and tokenizer. It must be equal for all runs."""

    def at(self, octave: int) -> float | None:
        """Return the loss of the octave that begins at position `octave`; None if not measured."""
        found = self.losses[self.positions == octave]
        return float(found[0]) if len(found) else None


def needs_positions(study: Study, arm: str) -> bool:
    return study.octave is not None or any(
        rule.over == POSITION and arm in rule.pairs[0] for rule in study.rules
    )


def position_losses(run: Run) -> PositionLosses:
    """Read the losses by position that `diffllm evaluate` measured at the last step of a run.

    Raises ConfigError if the results of the task `position` at this step are missing or damaged.
    """
    problems: dict[str, list[str]] = {}
    results = all_results(run.path, problems, run.cfg.steps).get(run.cfg.steps, {})
    if (found := results.get(POSITION)) is None:
        unusable = [reason for reason, files in problems.items() if f"{POSITION}.jsonl" in files[0]]
        why = f" ({unusable[0]})" if unusable else ""
        command = shlex.join(["diffllm", "evaluate", f"run={run.path}", f"tasks=[{POSITION}]"])
        raise ConfigError(
            f"{run.path} has no results of the task {POSITION} at the last step{why}; "
            f"run: {command}"
        )
    octaves = {
        start: finite(score["value"])
        for score in found["scores"]
        if (start := finite((score.get("level") or {}).get(POSITION)))
    }
    positions = np.array(sorted(octaves), dtype=np.float64)
    losses = np.array([octaves[at] for at in positions], dtype=np.float64)
    return PositionLosses(positions, losses, json.dumps(question_asked(found)))


def check_same_documents(losses: Iterable[PositionLosses | None]) -> None:
    """Raise ConfigError if losses by position were measured on different documents."""
    if len({each.settings for each in losses if each}) > 1:
        raise ConfigError(
            f"losses by {POSITION}: runs were evaluated on different documents; repeat `diffllm "
            f"evaluate tasks=[{POSITION}]` with the same limit=N and seq_len=N for all runs"
        )


def check_trends(study: Study, configs: Mapping[str, TrainConfig]) -> None:
    """Raise ConfigError if the trend of a rule cannot be computed.

    A trend over tokens needs enough evaluations. A trend over parameters must pass `check_sizes`.
    """
    for rule in study.rules:
        if rule.over == PARAMETERS:
            check_sizes(rule, {arm: totals(configs[arm].model)["params"] for arm in configs})
        elif rule.over == TOKENS and study.metric == "heldout_loss":
            for arm in rule.pairs[0]:
                check_evaluations(arm, configs[arm])


def check_evaluations(arm: str, cfg: TrainConfig) -> None:
    steps, interval = cfg.steps, cfg.eval.interval
    evaluated = {*range(interval, steps, interval), steps}
    counted = [step for step in evaluated if step >= WINDOW * steps]
    if len(counted) < FEWEST_POINTS:
        raise ConfigError(
            f"arm {arm}: eval.interval={interval} is too large: after the first {WINDOW:.0%} of "
            f"{steps} steps, it gives only {len(counted)} evaluations, but a trend over {TOKENS} "
            f"needs at least {FEWEST_POINTS}; reduce eval.interval"
        )


def check_sizes(rule: Rule, parameters: Mapping[str, float]) -> None:
    """Raise ConfigError unless the arms of a trend over model sizes have suitable sizes.

    `rule.arm` must have more parameters than the arms that `rule.smaller` names as its smaller
    versions, and these must all differ in size. The same holds for `rule.against`. `parameters`
    maps each arm to its number of parameters.
    """
    for side in zip(*rule.pairs, strict=True):
        sizes = [parameters[arm] for arm in side]
        if len({*sizes}) < len(sizes) or max(sizes) > sizes[-1]:
            said = ", ".join(f"{arm} {parameters[arm]:,.0f}" for arm in side)
            raise ConfigError(
                f"trend over {PARAMETERS}: the arms must have different numbers of parameters "
                f"({said}), and {side[-1]} must be the largest arm; change the sizes of these arms"
            )
