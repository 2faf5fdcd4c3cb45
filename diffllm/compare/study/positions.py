"""Losses by position in a document, which `diffllm evaluate tasks=[position]` measured."""

import json
import shlex
from collections.abc import Collection
from typing import NamedTuple

from diffllm.compare.arms.run import Run
from diffllm.compare.study.file import POSITION
from diffllm.core.errors import ConfigError
from diffllm.core.run_files import finite
from diffllm.evaluation.evaluation import all_results, question_of
from diffllm.evaluation.position import DOCUMENTS


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
    results_by_step = all_results(run.path, problems, run.cfg.steps)
    result = results_by_step.get(run.cfg.steps, {}).get(POSITION)
    if result is None:
        # The results may exist, but damaged: name the reason for this.
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
