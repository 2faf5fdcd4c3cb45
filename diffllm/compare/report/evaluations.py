"""Scores of `diffllm evaluate` in a report: means over seeds, and gaps paired by seed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffllm.compare.arms.arm import RunArm, Seeds, runs_of
from diffllm.compare.arms.run_search import shortlist
from diffllm.compare.arms.sentences import (
    ends,
    finite,
)
from diffllm.compare.report.checkpoint_scores import (
    Checkpoint,
    checkpoints,
    independent_examples,
    loss_of_all,
    scores_at,
)
from diffllm.evaluation.evaluation import SHARE, Line, Lines, all_results, question_of
from diffllm.metrics.metric import possible_values
from diffllm.statistics.estimates import Estimate, estimate, wilson
from diffllm.statistics.gap_tests import paired

Bases = Mapping[RunArm, RunArm]
"""The baseline of each row that has one."""


class ScoreCell(NamedTuple):
    mean: Estimate
    gap: Estimate | None
    over_examples: tuple[float, float] | None = None
    """Wilson's interval of a share, if the row has one seed or all seeds agree."""


class ScoreLine(NamedTuple):
    name: str
    """Level or metric of the score; "" if an evaluation has only one score."""
    chance: float | None
    cells: list[ScoreCell | None]
    """A cell per row; None without a score."""


class Evaluated(NamedTuple):
    name: str
    unit: str
    lines: list[ScoreLine]
    parts: list[ScoreLine]
    """Scores by a further fact of the examples, such as the depth of a needle."""
    equal: list[ScoreLine]
    """Scores interpolated at `loss`."""
    loss: float | None
    """The lowest loss of the held-out sample that all evaluated runs reached."""


def evaluations(
    rows: Sequence[RunArm], bases: Bases, step: int
) -> tuple[list[Evaluated], list[str]]:
    """Return the scores of all evaluations of the runs in a report, and notes about skipped runs.

    Args:
        step: use the checkpoints at this step; 0 selects the newest checkpoint of each run.
    """
    problems: dict[str, list[str]] = {}
    by_run: dict[Path, dict[int, Lines]] = {}
    names: dict[str, None] = {}
    for run in runs_of(rows):
        steps = all_results(run.path, problems, step)
        by_run[run.path] = steps
        if steps:
            # A dict of None is a set that keeps its order, in which the page shows evaluations.
            names |= dict.fromkeys(steps[max(steps)])
    notes = []
    for reason, files in problems.items():
        notes.append(f"{shortlist(files, 3)}: {reason}.")
    evaluated = []
    for name in names:
        scores, note = evaluation_of_rows(name, rows, bases, by_run)
        if scores:
            evaluated.append(scores)
        if note:
            notes.append(note)
    return evaluated, notes


def evaluation_of_rows(
    name: str,
    rows: Sequence[RunArm],
    bases: Bases,
    by_run: Mapping[Path, Mapping[int, Lines]],
) -> tuple[Evaluated | None, str]:
    """Combine the scores of the evaluation `name` over all runs.

    Args:
        by_run: results by run directory, then by checkpoint step, then by evaluation name.

    Returns:
        The scores, and a note about skipped runs. The scores are None if no run has a score; the
        note is "" if no run is skipped.
    """
    by_row, unit, skipped = comparable_checkpoints(name, rows, by_run)
    note = ""
    if skipped:
        note = (
            f"{name}: skipped {shortlist(skipped, 3)}, evaluated after another number of tokens, "
            "with another tokenizer, at other levels or on other examples."
        )
    newest: dict[RunArm, dict[Seeds, Lines]] = {}
    subgroups: dict[RunArm, dict[Seeds, Lines]] = {}
    checkpoints_of_runs: list[list[Checkpoint]] = []
    for row, runs in by_row.items():
        newest[row] = {}
        subgroups[row] = {}
        for seeds, points in runs.items():
            scores = points[-1].scores
            newest[row][seeds] = scores
            subgroups[row][seeds] = subgroup_scores(scores)
            checkpoints_of_runs.append(points)
    lines = score_lines(newest, bases, unit)
    if not lines:
        return None, note
    parts = score_lines(subgroups, bases, unit)
    loss = loss_of_all(checkpoints_of_runs)
    equal = []
    if loss is not None:
        equal = lines_at_loss(loss, by_row, bases, unit)
    return Evaluated(name, unit, lines, parts, equal, loss), note


def comparable_checkpoints(
    name: str, rows: Sequence[RunArm], by_run: Mapping[Path, Mapping[int, Lines]]
) -> tuple[dict[RunArm, dict[Seeds, list[Checkpoint]]], str, list[str]]:
    """Return the checkpoints with the evaluation `name` by row and seed, and the unit.

    Also return the directories of skipped runs: those whose number of training tokens or settings
    of the evaluation differ from those of the first evaluated run.
    """
    first_question: str | None = None
    unit = ""
    by_row: dict[RunArm, dict[Seeds, list[Checkpoint]]] = {row: {} for row in rows}
    skipped = []
    for row in rows:
        for run in row.runs:
            steps = by_run[run.path]
            step = max(steps, default=0)
            if name not in steps.get(step, {}):
                continue
            newest = steps[step][name]
            # A run with a larger batch has seen more tokens at the same step.
            question = json.dumps([run.tokens_at(step), question_of(newest)])
            if first_question is None:
                first_question, unit = question, newest["unit"]
            if question == first_question:
                by_row[row][run.seeds] = checkpoints(run, name, steps)
            else:
                skipped.append(str(run.path))
    return by_row, unit, skipped


def lines_at_loss(
    loss: float,
    by_row: Mapping[RunArm, Mapping[Seeds, Sequence[Checkpoint]]],
    bases: Bases,
    unit: str,
) -> list[ScoreLine]:
    """Return the scores at a held-out sample loss; [] if fewer than two rows have scores there."""
    scores = {}
    rows_with_scores = 0
    for row, runs in by_row.items():
        scores_of_row = {seeds: scores_at(loss, points) for seeds, points in runs.items()}
        scores[row] = scores_of_row
        if any(scores_of_row.values()):
            rows_with_scores += 1
    if rows_with_scores < 2:
        return []
    return score_lines(scores, bases, unit)


def subgroup_scores(scores: Lines) -> Lines:
    """Return the scores of subgroups of an evaluation's examples, by name of the subgroup.

    A score can have fields such as `by_depth`, a dict from the depth of a needle to the score of
    the examples with this depth. For example, if the score "512" has a field `by_depth` with the
    key 0.25, the name of this subgroup is "512, depth 0.25".
    """
    subgroups = {}
    for score_name, score in scores.items():
        for key, parts in score.items():
            if not key.startswith("by_") or not isinstance(parts, dict):
                continue
            for level, value in parts.items():
                name = f"{score_name}, {key.removeprefix('by_')} {level}"
                subgroups[name] = {"value": value, "range": score.get("range")}
    return subgroups


def score_lines(
    results: Mapping[RunArm, Mapping[Seeds, Lines]], bases: Bases, unit: str
) -> list[ScoreLine]:
    """Return the mean of each score over seeds, and its gap to the baseline, with 95% t intervals.

    Clip each interval to the possible values: [0, 1] for accuracies, or the score's field "range",
    if present. Clip the interval of a gap to the possible differences.

    Args:
        results: for each report row, the scores by seed, then by name.
    """
    names: dict[str, None] = {}
    for row_results in results.values():
        for scores in row_results.values():
            names |= dict.fromkeys(scores)
    lines = []
    for name in names:
        line = score_line(name, results, bases, unit)
        if any(line.cells):
            lines.append(line)
    return lines


def score_line(
    name: str, results: Mapping[RunArm, Mapping[Seeds, Lines]], bases: Bases, unit: str
) -> ScoreLine:
    """Return the cells of one score, see `score_lines`."""
    scores: list[Line] = []
    values = {}
    examples = {}
    for row, row_results in results.items():
        scores_of_row = {}
        for seeds, lines in row_results.items():
            if name in lines:
                scores_of_row[seeds] = lines[name]
        scores += scores_of_row.values()
        values[row] = values_by_seed(scores_of_row)
        examples[row] = min(map(independent_examples, scores_of_row.values()), default=0)
    low, high = score_limits(unit, scores[0])
    cells: list[ScoreCell | None] = []
    for row, row_values in values.items():
        if not row_values:
            cells.append(None)
            continue
        mean = estimate(list(row_values.values()))
        limited_mean = mean.within(low, high)
        limited_gap = None
        if row in bases:
            base_values = values[bases[row]]
            gap = paired(row_values, base_values)
            if gap:
                limited_gap = gap.estimate.within(low - high, high - low)
        interval = None
        if unit == SHARE:
            interval = over_examples(limited_mean, examples[row])
        cells.append(ScoreCell(limited_mean, limited_gap, interval))
    return ScoreLine(name, finite(scores[0].get("chance")), cells)


def values_by_seed(scores: Mapping[Seeds, Line]) -> dict[Seeds, float]:
    """Return the finite values of scores."""
    values = {}
    for seeds, score in scores.items():
        value = finite(score.get("value"))
        if value is not None:
            values[seeds] = value
    return values


def score_limits(unit: str, score: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and the largest possible value of a score."""
    low, high = map(finite, score.get("range") or (None, None))
    if unit == SHARE or low is None or high is None:
        # Results of older versions have the unit with "a" in place of "per".
        return possible_values(unit.replace(" a token", " per token"))
    return low, high


def over_examples(mean: Estimate, examples: float) -> tuple[float, float] | None:
    """Return Wilson's interval of an accuracy over `examples` independent examples.

    If the accuracy varies between seeds, return None, because it already has an interval over
    seeds.
    """
    varies = mean.low is not None and not mean.all_equal
    is_share = 0 <= mean.mean <= 1
    if varies or examples < 1 or not is_share:
        return None
    return wilson(mean.mean, examples)


def columns(evaluated: Sequence[Evaluated], row: int) -> dict[str, float | None]:
    """Return the columns of report.csv with the scores of a row, given as its index."""
    values: dict[str, float | None] = {}
    for evaluation in evaluated:
        lines_by_suffix = {"": evaluation.lines, ", equal loss": evaluation.equal}
        for suffix, lines in lines_by_suffix.items():
            for line in lines:
                level = f": {line.name}" if line.name else ""
                name = f"{evaluation.name}{level}{suffix}"
                # A row without the score has empty cells: all rows of report.csv have all columns.
                cell = line.cells[row]
                gap = cell.gap if cell else None
                values[name] = cell.mean.mean if cell else None
                values[f"{name}, gap"] = gap.mean if gap else None
                values |= ends(f"{name}, gap", gap)
    return values
