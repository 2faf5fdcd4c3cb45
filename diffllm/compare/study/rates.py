"""The grid of learning rates of a study, the choice of a rate for each arm, and the next runs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from diffllm.compare.study.arms import RateRun
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import RATES, Planned, deciding_runs, is_ended, rate_run
from diffllm.core.run_files import RunFile, read_summary


@dataclass(frozen=True)
class ChosenRate:
    """The learning rate of an arm, chosen by the losses of a grid of runs.

    `runs` are the runs of the grid. `losses` maps each rate, in increasing order, to its mean loss
    over seeds. The mean is infinite if a seed diverged, and NaN if a seed has not ended.
    `remaining` lists the runs of the grid that have not ended. `lr` is None if `remaining` is not
    empty or if every rate diverged. `problem` says why `lr` cannot be trusted.
    """

    arm: str
    runs: list[Planned]
    losses: dict[float, float]
    remaining: list[Planned]
    lr: float | None
    problem: str


def grid_directories(out: Path) -> dict[str, Path]:
    """Return the directories of all started runs in the learning rate grid, by run name."""
    files = sorted((out / RATES).glob(f"*/{RunFile.CONFIG}"))
    return {f"{RATES}/{file.parent.name}": file.parent for file in files}


def rate_runs(out: Path) -> dict[str, RateRun]:
    """Return the ended runs in the learning rate grid, by name."""
    runs = {}
    for name, path in grid_directories(out).items():
        if is_ended(path):
            summary = read_summary(path) or {}
            runs[name] = RateRun(name, summary.get("heldout_loss"))
    return runs


def choose_rates(study: Study, ended: Mapping[str, RateRun]) -> list[ChosenRate]:
    """Choose the learning rate of each arm by the ended runs of the grid, by name.

    The result is empty for a study without a grid.
    """
    if study.lr is None:
        return []
    return [choose_rate(study, arm, ended) for arm in study.arms]


def choose_rate(study: Study, arm: str, ended: Mapping[str, RateRun]) -> ChosenRate:
    """Choose for an arm the learning rate with the lowest mean loss over seeds.

    If the best rate is the smallest or largest of the grid, add one more rate at this end of the
    grid, at most `lr.extend` times. While runs of the grid have not ended, `lr` of the result is
    None and `remaining` lists these runs.
    """
    rates = study.lr
    assert rates
    grid = list(rates.grid)
    added = {"smallest": 0, "largest": 0}
    while True:
        choice = choose_from_grid(study, arm, grid, ended)
        best = choice.lr
        if best is None or best not in (grid[0], grid[-1]):
            return choice
        # The best rate may be outside of the grid.
        end = "smallest" if best == grid[0] else "largest"
        if added[end] == rates.extend:
            return replace(choice, problem=choice.problem or f"the best is the {end} of the grid")
        added[end] += 1
        # Each end of the grid grows by the ratio of the two rates at this end of the study's grid.
        outer, inner = rates.grid[:2]
        if end == "largest":
            inner, outer = rates.grid[-2:]
        # Six digits, so that the name of the run has the same rate as its override.
        added_rate = float(f"{best * outer / inner:.6g}")
        grid = sorted([*grid, added_rate])


def choose_from_grid(
    study: Study, arm: str, grid: list[float], ended: Mapping[str, RateRun]
) -> ChosenRate:
    """Choose for an arm the rate in `grid` with the lowest mean loss over seeds."""
    assert study.lr
    runs: list[Planned] = []
    remaining: list[Planned] = []
    losses = {}
    problem = ""
    for lr in grid:
        total = 0.0
        for seed in study.lr.seeds:
            planned = rate_run(study, arm, seed, lr)
            runs.append(planned)
            run = ended.get(planned.name)
            if run is None:
                remaining.append(planned)
                total = math.nan  # The mean over all seeds is unknown.
                continue
            total += math.inf if run.loss is None else run.loss
            if run.strayed:
                problem = f"{planned.name} is not the run of the study: {run.strayed}"
        losses[lr] = total / len(study.lr.seeds)
    best = None
    if not remaining:
        best = min(losses, key=losses.__getitem__)
        if not math.isfinite(losses[best]):
            best = None
            problem = problem or "every learning rate diverged"
    return ChosenRate(arm, runs, losses, remaining, best, problem)


def next_runs(study: Study, out: Path) -> list[Planned]:
    """Return the runs of the current stage that have not ended.

    The first stage is the grid of learning rates, if the study has a grid. The second stage
    contains the runs that the study's rules compare.
    """
    rates: dict[str, float | None] = dict.fromkeys(study.arms)
    runs_of_grid: list[Planned] = []
    for choice in choose_rates(study, rate_runs(out)):
        runs_of_grid += choice.remaining
        rates[choice.arm] = choice.lr
    if runs_of_grid:
        return runs_of_grid
    runs: list[Planned] = []
    for seed in study.seeds:
        for arm, lr in rates.items():
            # An arm that diverged at every rate of the grid has no compared runs.
            if lr is not None or not study.lr:
                runs += deciding_runs(study, arm, seed, lr)
    return [run for run in runs if not is_ended(out / run.name)]
