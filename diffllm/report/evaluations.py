"""Evaluations of checkpoints beside each other: means over seeds, and gaps over the same seeds."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from diffllm.evaluation.results import SHARE, Line, newest_results
from diffllm.report.difficulty import Curves, curves
from diffllm.report.find import listed
from diffllm.report.numbers import finite
from diffllm.report.rows import Row
from diffllm.statistics.intervals import Estimate, estimate
from diffllm.statistics.survival import Times

ALL = "mean of all levels"
LEVEL = 0.9
"""The share of right answers whose first time is told."""


class Cell(NamedTuple):
    """A score of a row."""

    mean: Estimate
    """Over the seeds that have it."""
    gap: Estimate | None
    """Its difference to the baseline's, paired over the seeds of both."""


class ScoreLine(NamedTuple):
    """A score of all rows."""

    of: str
    chance: float | None
    cells: list[Cell | None]
    """One a row; None where it has not been measured."""


class Grid(NamedTuple):
    """The scores of a row by a fact of the examples, as depth, and by level."""

    fact: str
    row: int
    levels: list[str]
    lines: list[tuple[str, list[float | None]]]
    """A value of the fact, and the mean over seeds at each level."""


class Evaluated(NamedTuple):
    """An evaluation of all rows."""

    name: str
    unit: str
    lines: list[ScoreLine]
    grids: list[Grid]
    curves: list[Curves]


def evaluations(rows: Sequence[Row], notes: list[str]) -> list[Evaluated]:
    """Gather the results that runs have of their newest evaluated checkpoints.

    Args:
        notes: gets a sentence for each evaluation that not all runs were asked alike.
    """
    by_run = {run.path: newest_results(run.path) for row in rows for run in row.runs}
    names = dict.fromkeys(name for _, found in by_run.values() for name in found)
    return [made for name in names if (made := gathered(name, rows, by_run, notes))]


def gathered(
    name: str, rows: Sequence[Row], by_run: dict[Any, tuple[int, dict[str, Line]]], notes: list[str]
) -> Evaluated | None:
    """Gather one evaluation, of the runs that were asked the same as the first of them."""
    asked: str | None = None
    results: list[dict[tuple[int, int], dict[str, Line]]] = []
    unit, others = "", []
    for row in rows:
        own = {}
        for run in row.runs:
            step, found = by_run[run.path]
            if name not in found:
                continue
            key = {k: v for k, v in found[name]["key"].items() if k != "checkpoint"}
            question = json.dumps([step * run.cfg.global_batch_size * run.cfg.seq_len, key])
            asked, unit = asked or question, unit or found[name]["unit"]
            if question == asked:
                scores = found[name]["scores"]
                own[run.seeds] = {score["of"]: score for score in [*overall(unit, scores), *scores]}
            else:
                others.append(str(run.path))
        results.append(own)
    if others:
        notes.append(
            f"{name}: {listed(others, 3)} left out, evaluated after other tokens, with another "
            "tokenizer or at other levels than the first."
        )
    labels = dict.fromkeys(of for own in results for scores in own.values() for of in scores)
    if not labels:
        return None
    places = {id(row): i for i, row in enumerate(rows)}
    bases = [places.get(id(row.against)) if row.against else None for row in rows]
    lines = [score_line(of, results, bases) for of in labels]
    kept = [line for line in lines if any(line.cells)]
    return Evaluated(name, unit, kept, grids(results), curves(results)) if kept else None


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
    of: str, results: list[dict[tuple[int, int], dict[str, Line]]], bases: list[int | None]
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
    cells: list[Cell | None] = []
    for own, base in zip(values, bases, strict=True):
        theirs = {} if base is None else values[base]
        common = sorted(own.keys() & theirs.keys())
        gap = estimate([own[seeds] - theirs[seeds] for seeds in common]) if common else None
        cells.append(Cell(estimate(list(own.values())), gap) if own else None)
    every = [scores[of] for own in results for scores in own.values() if of in scores]
    return ScoreLine(of, finite(every[0].get("chance")), cells)


def grids(results: list[dict[tuple[int, int], dict[str, Line]]]) -> list[Grid]:
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
            lines = [(v, [over_seeds(own, of, fact, v) for of in levels]) for v in values]
            if any(x is not None for _, cells in lines for x in cells):
                found.append(Grid(fact.removeprefix("by_"), row, levels, lines))
    return found


def over_seeds(
    own: dict[tuple[int, int], dict[str, Line]], of: str, fact: str, value: str
) -> float | None:
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
    """Return the columns of a row in report.csv: each score, and its gap with its interval."""
    found: dict[str, float | None] = {}
    for each in evaluated:
        for line in each.lines:
            cell, name = line.cells[row], f"{each.name}: {line.of}" if line.of else each.name
            gap = cell.gap if cell else None
            found[name] = cell.mean.mean if cell else None
            found[f"{name}, gap"] = gap.mean if gap else None
            found[f"{name}, gap_low"] = gap.low if gap else None
            found[f"{name}, gap_high"] = gap.high if gap else None
    return found
