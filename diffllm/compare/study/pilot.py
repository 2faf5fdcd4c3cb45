"""Compute from pilot runs how many seeds, tokens and hours a study needs to find a gap."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.compare.arms.sentences import finite
from diffllm.compare.report.comparison import read
from diffllm.compare.report.notes import thin_note
from diffllm.compare.report.rows import Row
from diffllm.compare.study.design import exact_note
from diffllm.core.errors import ConfigError
from diffllm.statistics.power_analysis import (
    chance_of_less,
    least_seeds,
    paired_power,
    welch_power,
)
from diffllm.statistics.seed_variance import Pairs, SeedSpread, pairs, pooled
from diffllm.statistics.smallest_p import smallest_p

SHOWN = (3, 5, 8, 12)
ARMS = 2
HALF = 0.5
"""Power below which a study is more likely to miss the gap than to find it."""
TESTS: dict[str, tuple[str, Callable[..., float]]] = {
    "unpaired": ("welch", welch_power), "paired": ("paired", paired_power),
}  # fmt: skip
"""Test of a study and its power, by design."""


@dataclass(frozen=True)
class Goal:
    """The gap that a planned study must find, and the settings of its test.

    `sides` is 1 or 2. `comparisons` is the number of tests; alpha is divided by this number.
    """

    gap: float
    alpha: float
    power: float
    sides: int
    comparisons: int


def power_numbers(paths: list[Path], goal: Goal) -> tuple[dict[str, Any], Pairs | None]:
    """Return the JSON object that `diffllm power --json` prints, computed from pilot runs.

    `paths` are run directories, parent directories or globs. Runs with different settings form
    separate groups, of which only the group with most seeds is used. Raises ConfigError if no arm
    has two seeds with a finite loss, or if all losses are equal.

    Returns:
        The JSON object, and statistics of the loss differences between arms at equal seeds. The
        statistics are None if there are fewer than two arms, or if the arms share fewer than two
        seeds.
    """
    comparison, _ = read(paths)
    first, *others = sorted(
        comparison.groups,
        key=lambda group: sum(max(0, len(finite_losses(row)) - 1) for row in group.rows),
        reverse=True,
    )
    rows = [row for row in first.rows if row.ended]
    losses = [finite_losses(row) for row in rows]
    several = [each for each in losses if len(each) > 1]
    spread, diverged = pooled(several), sum(row.diverged for row in rows)
    finished = [run.summary or {} for row in rows for run in row.finished]
    if spread is None:
        raise ConfigError(
            f"pilot={comparison.title}: no arm has two seeds with a finite loss "
            f"({len(finished)} runs finished, {diverged} diverged); train one arm with more seeds"
        )
    if not spread.sd:
        raise ConfigError(
            f"pilot={comparison.title}: the seeds of each arm have the same loss, so power "
            "cannot be computed; choose runs with different losses"
        )
    times = [x for summary in finished if (x := finite(summary.get("seconds")))]
    seconds = float(np.mean(times)) if times else None
    tokens, paired = first.rows[0].runs[0].planned_tokens, pairs(several)

    needs = [seeds_needed(goal, "unpaired", spread)]
    if paired and paired.differences.sd:
        needs.append(seeds_needed(goal, "paired", paired.differences))
    for each in needs:
        runs_needed = ARMS * each["seeds"] if each["seeds"] else None
        each["total_tokens"] = runs_needed and runs_needed * tokens
        each["hours"] = runs_needed and seconds and runs_needed * seconds / 3600
    exact = [
        exact_note(
            TESTS[each["design"]][0], each["seeds"], goal.comparisons, goal.alpha, goal.sides
        )
        for each in needs
        if each["seeds"]
    ]
    left_out = ", ".join(row.label for group in others for row in group.rows)
    note = f"ignored, because their settings differ from the other runs: {left_out}"
    thin = thin_note(run for row in rows for run in row.finished)
    arms = [
        {"arm": row.label, "seeds": len(own), "diverged": row.diverged,
         "sd": (found := pooled([own])) and found.sd}
        for row, own in zip(rows, losses, strict=True)
    ]  # fmt: skip
    low, high = spread.interval
    return {
        **vars(goal),
        "pilot": comparison.title,
        "arms": arms,
        "runs": sum(map(len, losses)) + diverged,
        "diverged": diverged,
        "tokens": tokens,
        "seconds": seconds,
        **{"sd": spread.sd, "sd_low": low, "sd_high": high, "df": spread.df},
        "correlation": paired and paired.correlation,
        "sd_of_differences": paired and paired.differences.sd,
        "needs": needs,
        "notes": [*filter(None, (note * bool(left_out), thin, *exact))],
    }, paired


def seeds_needed(goal: Goal, design: str, spread: SeedSpread) -> dict[str, Any]:
    """Return how many seeds per arm a study needs, as entries of `diffllm power --json`.

    `design` is "paired" or "unpaired". `spread` is the standard deviation between the seeds of the
    pilot, with confidence limits. The keys that begin with `seeds` are numbers of seeds: one is for
    the estimated standard deviation, and one is for each confidence limit. `too_few` is the
    probability that a pilot of this size recommends too few seeds for goal.power.
    """
    name, test = TESTS[design]

    def chance(sd: float, seeds: int) -> float:
        return test(goal.gap, sd, seeds, goal.alpha / goal.comparisons, goal.sides)

    (low, high), upper = spread.interval, spread.upper
    sds = {"seeds": upper, "seeds_by_sd": spread.sd, "seeds_low": low, "seeds_high": high}
    seeds = {key: least_seeds(partial(chance, sd), goal.power) for key, sd in sds.items()}
    asked = seeds["seeds"]
    risks = {
        f"{risk}{by}": chance_of_less(chance, spread, sd / spread.sd, goal.power, less)
        for by, sd in (("", upper), ("_by_sd", spread.sd))
        for risk, less in (("too_few", goal.power), ("far_too_few", HALF))
    }
    return {
        "design": design,
        **{"sd": spread.sd, "sd_low": low, "sd_high": high, "sd_upper": upper, "df": spread.df},
        **seeds,
        "power": chance(upper, asked) if asked else None,
        "power_by_seeds": {n: chance(upper, n) for n in SHOWN},
        **risks,
        "smallest_p": smallest_p(name, asked, asked, goal.sides) if asked else None,
    }


def finite_losses(row: Row) -> dict[tuple[int, int], float]:
    return {seed: loss for seed, loss in row.losses.items() if loss is not None}
