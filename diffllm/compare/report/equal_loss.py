"""Scores of evaluations at a loss that all runs reached: each between two of its checkpoints."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from diffllm.compare.report.numbers import finite
from diffllm.compare.report.runs import Run
from diffllm.evaluation.results import Line, Lines


class Checkpoint(NamedTuple):
    """A checkpoint that was evaluated."""

    loss: float
    """On the held-out sample, as it was logged at the same step; nats a token."""
    scores: Lines


def loss_at(run: Run, tokens: int) -> float | None:
    """Return the held-out loss that was logged after so many tokens; None without one."""
    series = run.series("eval/loss")
    found = np.flatnonzero(series.tokens == tokens)
    return finite(float(series.values[found[0]])) if len(found) else None


def loss_of_all(runs: Sequence[Sequence[Checkpoint]]) -> float | None:
    """Return the lowest loss that every run has reached at a checkpoint or between two; None where
    no run's lies between two, so that there is nothing to read beyond the checkpoints."""
    evaluated = [run for run in runs if run]
    if len(evaluated) < 2:
        return None
    loss = max(min(each.loss for each in run) for run in evaluated)
    return loss if any(min(each.loss for each in run) < loss for run in evaluated) else None


def scores_at(loss: float, checkpoints: Sequence[Checkpoint]) -> Lines:
    """Return the scores of a run at a loss, those of the two checkpoints around it interpolated;
    none where it was not evaluated on both sides.

    Args:
        checkpoints: in the order of training.
    """
    for each in checkpoints:
        if each.loss == loss:
            return each.scores
    for before, after in pairwise(checkpoints):
        if before.loss > loss > after.loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            return {
                of: between(before.scores[of], own, share)
                for of, own in after.scores.items()
                if of in before.scores
            }
    return {}


def between(before: Line, after: Line, share: float) -> Line:
    """Return a score so far on the way from one to another; no value where one has none."""
    first, last = finite(before.get("value")), finite(after.get("value"))
    value = None if first is None or last is None else (1 - share) * first + share * last
    return {"of": after["of"], "value": value, "chance": after.get("chance")}
