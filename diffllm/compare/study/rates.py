"""The choice of every arm's learning rate, by runs that decide nothing else."""

import math
from dataclasses import dataclass
from pathlib import Path

from diffllm.compare.study.file import Rates, Study
from diffllm.compare.study.runs import Planned, heldout_loss, rate_run


@dataclass(frozen=True)
class Choice:
    """The state of the choice of one arm."""

    arm: str
    losses: dict[float, float | None]
    """Learning rate to mean held-out loss, increasing; infinite where a seed diverged, None where
    one has not ended."""
    wanted: list[Planned]
    """The runs that are still to end."""
    lr: float | None = None
    """The best one, once all runs have ended and one of them is finite."""
    problem: str = ""
    """Why the best one is not to be trusted: it lies at an end of a grid that goes no further."""


def choose_all(study: Study, out: Path) -> list[Choice]:
    """Choose the learning rate of every arm; return an empty list if the study chooses none."""
    return [choose(study, arm, out) for arm in study.arms] if study.lr else []


def choose(study: Study, arm: str, out: Path) -> Choice:
    """Choose an arm's learning rate from the runs in `out`, as far as they have ended.

    Where the best lies at an end of the grid, the grid goes on there by the same ratio, as often as
    the study allows.
    """
    rates = study.lr
    assert rates
    grid, added = list(rates.grid), [0, 0]
    while True:
        losses: dict[float, float | None] = {}
        wanted: list[Planned] = []
        for lr in grid:
            runs = [rate_run(study, arm, seed, lr) for seed in rates.seeds]
            ended = [heldout_loss(out / run.name) for run in runs]
            known = [loss for loss in ended if loss is not None]
            wanted += [run for run, loss in zip(runs, ended, strict=True) if loss is None]
            losses[lr] = sum(known) / len(known) if len(known) == len(runs) else None
        means = {lr: loss for lr, loss in losses.items() if loss is not None}
        if wanted:
            return Choice(arm, losses, wanted)
        best = min(grid, key=means.__getitem__)
        if not math.isfinite(means[best]):
            return Choice(arm, losses, [], None, "every learning rate diverged")
        end = (grid[-1] == best) - (grid[0] == best)
        if not end:
            return Choice(arm, losses, [], best)
        side = int(end > 0)
        if added[side] == rates.extend:
            where = "largest" if side else "smallest"
            return Choice(arm, losses, [], best, f"the best is the {where} of the grid")
        added[side] += 1
        grid = [*grid, beyond(rates, grid, 1)] if side else [beyond(rates, grid, 0), *grid]


def beyond(rates: Rates, grid: list[float], side: int) -> float:
    """The next rate after an end of a grid, by the ratio that it has there."""
    first, second = (rates.grid[-2:]) if side else rates.grid[1::-1]
    return float(f"{(grid[-1] if side else grid[0]) * second / first:.6g}")
