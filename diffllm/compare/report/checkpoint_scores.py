"""Scores of a run's evaluated checkpoints, also interpolated at a held-out loss."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from diffllm.compare.arms.run import Run
from diffllm.compare.arms.sentences import finite
from diffllm.evaluation.evaluation import SHARE, Line, Lines, question_of

ALL = "mean of all levels"


class Checkpoint(NamedTuple):
    loss: float | None
    """Held-out loss logged at the same step, nats per token."""
    scores: Lines


def checkpoints(run: Run, name: str, steps: Mapping[int, Lines]) -> list[Checkpoint]:
    """Return the checkpoints whose evaluation asks the question of the newest one, by step."""
    places, losses = run.metrics.columns.get("eval/loss", ((), ()))
    logged = {}
    for place, loss in zip(places, losses, strict=True):
        step = int(run.metrics.steps[place])
        logged[step] = float(loss)
    newest_step = max(steps)
    newest_question = question_of(steps[newest_step][name])
    result = []
    for step in sorted(steps):
        score = steps[step].get(name)
        if score is not None and question_of(score) == newest_question:
            loss_at_step = finite(logged.get(step))
            result.append(Checkpoint(loss_at_step, by_name(score)))
    return result


def by_name(result: Line) -> Lines:
    """Return the scores of an evaluation result, by name of the score.

    If the result contains several accuracies, one per level of the task (such as a context
    length), add the mean accuracy as the first score.
    """
    scores = result["scores"]
    # Other evaluations have several metrics instead of several levels, which have no mean.
    if result["unit"] == SHARE and len(scores) > 1:
        means: Line = {
            "of": ALL,
            "value": mean_of_all(scores, "value"),
            "chance": mean_of_all(scores, "chance"),
            "examples": sum(map(independent_examples, scores)),
        }
        scores = [means, *scores]
    return {score["of"]: score for score in scores}


def mean_of_all(scores: Sequence[Line], key: str) -> float | None:
    """Return the mean of a number over all scores; None if it is missing in a score."""
    numbers = []
    for score in scores:
        number = finite(score.get(key))
        if number is None:
            return None
        numbers.append(number)
    return sum(numbers) / len(numbers)


def independent_examples(score: Line) -> float:
    """Return the number of independent examples of a score; 0 if it is not recorded."""
    return finite(score.get("independent", score.get("examples"))) or 0


def loss_of_all(runs: Sequence[Sequence[Checkpoint]]) -> float | None:
    """Return the lowest loss that all runs reached, at which their scores can be compared.

    This is the largest of the lowest losses of the runs. Only the losses of evaluated checkpoints
    count. Return None if all runs have the same lowest loss, or if no run has a loss.
    """
    lowest = []
    for checkpoints_of_run in runs:
        losses = [point.loss for point in checkpoints_of_run if point.loss is not None]
        if losses:
            lowest.append(min(losses))
    has_one_loss_at_most = len(set(lowest)) < 2
    return None if has_one_loss_at_most else max(lowest)


def scores_at(loss: float, checkpoints: Sequence[Checkpoint]) -> Lines:
    """Interpolate a run's scores linearly between checkpoints, at the held-out sample loss `loss`.

    Return {} if `loss` is outside of the range of the checkpoints' losses.
    """
    points = []
    for point in checkpoints:
        if point.loss is not None:
            points.append((point.loss, point.scores))
    # Scores at exactly this loss are measured, and keep fields that interpolation drops.
    for point_loss, scores in points:
        if point_loss == loss:
            return scores
    for (first_loss, first_scores), (last_loss, last_scores) in pairwise(points):
        # The loss can rise and fall again; the first time that it reaches `loss` counts.
        if first_loss > loss > last_loss:
            share = (first_loss - loss) / (first_loss - last_loss)
            return interpolated(first_scores, last_scores, share)
    return {}


def interpolated(first: Lines, last: Lines, share: float) -> Lines:
    """Return the scores that two checkpoints have, at the fraction `share` between them."""
    scores: dict[str, Line] = {}
    for name, score in last.items():
        if name not in first:
            continue
        start = finite(first[name].get("value"))
        end = finite(score.get("value"))
        value = None
        if start is not None and end is not None:
            value = (1 - share) * start + share * end
        scores[name] = {
            "of": name,
            "value": value,
            "chance": score.get("chance"),
            "range": score.get("range"),
        }
    return scores
