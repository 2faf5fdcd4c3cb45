"""Evaluations of checkpoints beside each other: means over seeds, and gaps over the same seeds."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diffllm.compare.report.find import shortlist
from diffllm.compare.report.numbers import finite
from diffllm.compare.report.rows import Row
from diffllm.compare.report.runs import Run
from diffllm.evaluation.evaluation import SHARE, Line, Lines, all_results
from diffllm.statistics.estimates import Estimate, Times, estimate

ALL = "mean of all levels"
LEVEL = 0.9
"""The share of right answers whose first time is told."""


class ScoreCell(NamedTuple):
    """A score of a row."""

    mean: Estimate
    """Over the seeds that have it."""
    gap: Estimate | None
    """Its difference to the baseline's, paired over the seeds of both."""


class ScoreLine(NamedTuple):
    """A score of all rows."""

    of: str
    chance: float | None
    cells: list[ScoreCell | None]
    """One a row; None where it has not been measured."""


class Grid(NamedTuple):
    """The scores of a row by a fact of the examples, as depth, and by level."""

    fact: str
    row: int
    levels: list[str]
    lines: list[tuple[str, list[float | None]]]
    """A value of the fact, and the mean over seeds at each level."""


class AtEqualLoss(NamedTuple):
    """The scores of an evaluation at a loss that all evaluated runs reached."""

    loss: float
    """Of the held-out sample, in nats a token."""
    lines: list[ScoreLine]


class Checkpoint(NamedTuple):
    """A checkpoint that was evaluated."""

    loss: float
    """On the held-out sample, as it was logged at the same step; nats a token."""
    scores: Lines


class Evaluated(NamedTuple):
    """An evaluation of all rows."""

    name: str
    unit: str
    lines: list[ScoreLine]
    grids: list[Grid]
    equal: AtEqualLoss | None = None


def evaluations(rows: Sequence[Row], notes: list[str]) -> list[Evaluated]:
    """Gather the results that runs have of their newest evaluated checkpoints.

    Args:
        notes: gets a sentence for each evaluation that not all runs were asked alike, and for
            results that are skipped or not verified.
    """
    problems: dict[str, list[str]] = {}
    by_run = {run.path: all_results(run.path, problems) for row in rows for run in row.runs}
    notes += [f"{shortlist(files, 3)}: {reason}." for reason, files in problems.items()]
    names = dict.fromkeys(name for steps in by_run.values() if steps for name in steps[max(steps)])
    return [made for name in names if (made := gathered(name, rows, by_run, notes))]


def gathered(
    name: str, rows: Sequence[Row], by_run: Mapping[Path, Mapping[int, Lines]], notes: list[str]
) -> Evaluated | None:
    """Gather one evaluation, of the runs that were asked the same as the first of them."""
    asked: str | None = None
    results: list[dict[tuple[int, int], Lines]] = []
    along: list[dict[tuple[int, int], list[Checkpoint]]] = []
    unit, others = "", []
    for row in rows:
        own, own_along = {}, {}
        for run in row.runs:
            steps = by_run[run.path]
            step = max(steps, default=0)
            if name not in steps.get(step, {}):
                continue
            newest = steps[step][name]
            question = json.dumps([tokens_at(run, step), question_of(newest)])
            asked, unit = asked or question, unit or newest["unit"]
            if question == asked:
                own[run.seeds] = by_name(newest)
                own_along[run.seeds] = checkpoints(run, name, steps)
            else:
                others.append(str(run.path))
        results.append(own)
        along.append(own_along)
    if others:
        notes.append(
            f"{name}: {shortlist(others, 3)} left out, evaluated after other tokens, with another "
            "tokenizer or at other levels than the first."
        )
    labels = dict.fromkeys(of for own in results for scores in own.values() for of in scores)
    if not labels:
        return None
    places = {id(row): i for i, row in enumerate(rows)}
    bases = [places.get(id(row.against)) if row.against else None for row in rows]
    if not (kept := score_lines(labels, results, bases)):
        return None
    equal = at_equal_loss(labels, along, bases)
    return Evaluated(name, unit, kept, grids(results), equal)


def tokens_at(run: Run, step: int) -> int:
    return step * run.cfg.global_batch_size * run.cfg.seq_len


def question_of(result: Line) -> Line:
    return {k: v for k, v in result["key"].items() if k != "checkpoint"}


def by_name(result: Line) -> Lines:
    """Return the scores of a result by name, the mean over its levels first."""
    scores = [*overall(result["unit"], result["scores"]), *result["scores"]]
    return {score["of"]: score for score in scores}


def checkpoints(run: Run, name: str, steps: Mapping[int, Lines]) -> list[Checkpoint]:
    """List the checkpoints of a run that were asked the same as the newest, with their losses."""
    newest = question_of(steps[max(steps)][name])
    return [
        Checkpoint(loss, by_name(found[name]))
        for step, found in steps.items()
        if name in found and question_of(found[name]) == newest
        if (loss := loss_at(run, tokens_at(run, step))) is not None
    ]


def at_equal_loss(
    labels: Iterable[str],
    along: list[dict[tuple[int, int], list[Checkpoint]]],
    bases: list[int | None],
) -> AtEqualLoss | None:
    """Set the scores at a loss that all runs reached beside each other; None unless two rows have
    any."""
    loss = loss_of_all([run for own in along for run in own.values()])
    if loss is None:
        return None
    read = [{seeds: scores_at(loss, run) for seeds, run in own.items()} for own in along]
    results = [{seeds: scores for seeds, scores in own.items() if scores} for own in read]
    if sum(map(bool, results)) < 2:
        return None
    return AtEqualLoss(loss, score_lines(labels, results, bases))


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


def score_lines(
    labels: Iterable[str], results: list[dict[tuple[int, int], Lines]], bases: list[int | None]
) -> list[ScoreLine]:
    """Set the scores of all rows beside each other, those that some row has."""
    lines = [score_line(of, results, bases) for of in labels]
    return [line for line in lines if any(line.cells)]


def overall(unit: str, scores: list[Line]) -> list[Line]:
    """Return the mean of shares over levels, where there are several, as one more score."""
    if unit != SHARE or len(scores) < 2:
        return []
    means: Line = {"of": ALL}
    for key in ("value", "chance"):
        known = [x for score in scores if (x := finite(score.get(key))) is not None]
        means[key] = sum(known) / len(known) if len(known) == len(scores) else None
    return [means]


def score_line(
    of: str, results: list[dict[tuple[int, int], Lines]], bases: list[int | None]
) -> ScoreLine:
    """Set one score of all rows beside each other."""
    values = [
        {
            seeds: value
            for seeds, scores in own.items()
            if of in scores and (value := finite(scores[of].get("value"))) is not None
        }
        for own in results
    ]
    cells: list[ScoreCell | None] = []
    for own, base in zip(values, bases, strict=True):
        theirs = {} if base is None else values[base]
        common = sorted(own.keys() & theirs.keys())
        gap = estimate([own[seeds] - theirs[seeds] for seeds in common]) if common else None
        cells.append(ScoreCell(estimate(list(own.values())), gap) if own else None)
    every = [scores[of] for own in results for scores in own.values() if of in scores]
    return ScoreLine(of, finite(every[0].get("chance")), cells)


def grids(results: list[dict[tuple[int, int], Lines]]) -> list[Grid]:
    """Gather what scores say by further facts, their keys beginning with "by_"."""
    every = [score for own in results for scores in own.values() for score in scores.values()]
    facts = dict.fromkeys(
        k
        for score in every
        for k, v in score.items()
        if k.startswith("by_") and isinstance(v, dict)
    )
    found = []
    for fact in facts:
        levels = list(dict.fromkeys(score["of"] for score in every if fact in score))
        values = list(dict.fromkeys(v for score in every for v in score.get(fact, ())))
        for row, own in enumerate(results):
            lines = [(v, [seed_mean(own, of, fact, v) for of in levels]) for v in values]
            if any(x is not None for _, cells in lines for x in cells):
                found.append(Grid(fact.removeprefix("by_"), row, levels, lines))
    return found


def seed_mean(own: dict[tuple[int, int], Lines], of: str, fact: str, value: str) -> float | None:
    """Return the mean over seeds at a level and a value of a fact; None without any."""
    found = [scores[of].get(fact, {}).get(value) for scores in own.values() if of in scores]
    known = [x for each in found if (x := finite(each)) is not None]
    return sum(known) / len(known) if known else None


def reaching(rows: Sequence[Row]) -> list[tuple[str, list[Times | None]]]:
    """Gather when the runs of each row first answered `LEVEL` of a task right in training, by task;
    None where a row was not asked."""
    logged = [name for row in rows for run in row.runs for name in run.metrics.columns]
    names = [name for name in dict.fromkeys(logged) if name.startswith("tasks/")]
    found = []
    for name in names:
        times = []
        for row in rows:
            known = [when for run in row.runs if (when := run.reached(name, LEVEL))]
            times.append(Times.of(known) if known else None)
        found.append((name.removeprefix("tasks/"), times))
    return found


def columns(evaluated: Sequence[Evaluated], row: int) -> dict[str, float | None]:
    """Return the columns of a row in report.csv: each score, and its gap with its interval, at the
    end and at equal loss."""
    found: dict[str, float | None] = {}
    for each in evaluated:
        equal = each.equal.lines if each.equal else []
        for line, where in [*((x, "") for x in each.lines), *((x, ", equal loss") for x in equal)]:
            cell, name = line.cells[row], f"{each.name}: {line.of}" if line.of else each.name
            name += where
            gap = cell.gap if cell else None
            found[name] = cell.mean.mean if cell else None
            found[f"{name}, gap"] = gap.mean if gap else None
            found[f"{name}, gap_low"] = gap.low if gap else None
            found[f"{name}, gap_high"] = gap.high if gap else None
    return found
