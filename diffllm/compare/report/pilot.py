"""Compute from pilot runs how many seeds, tokens and hours a study needs to find a gap."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diffllm.compare.arms.heldout import thin_note
from diffllm.compare.arms.sentences import exact_note
from diffllm.compare.report.comparison import read
from diffllm.compare.report.rows import Group, Row
from diffllm.core.errors import ConfigError
from diffllm.core.run_files import finite
from diffllm.statistics.power_analysis import chance_of_less, least_seeds, paired_power
from diffllm.statistics.seed_variance import SeedSpread, pairs, pooled

POWER_SEEDS = (3, 5, 8, 12)
"""Numbers of seeds for which the power is printed."""
ARMS_OF_GAP = 2
LOW_POWER = 0.5
"""Power below which a study is more likely to miss the gap than to find it."""


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


def power_numbers(paths: list[Path], goal: Goal) -> dict[str, Any]:
    """Return the JSON object that `diffllm power --json` prints, computed from pilot runs.

    `paths` are run directories, parent directories or globs. Runs with different settings form
    separate groups, of which only the group with most seeds is used. Raises ConfigError if no arm
    has two seeds with a finite loss, or if all losses are equal.
    """
    comparison, _ = read(paths)
    group, *ignored = sorted(comparison.groups, key=degrees_of_freedom, reverse=True)
    rows = [row for row in group.rows if row.ended]
    spread = loss_spread(comparison.title, rows)
    diverged = 0
    losses = 0
    losses_of_several_seeds = []
    for row in rows:
        diverged += row.diverged
        losses += len(row.finite_values)
        if len(row.finite_values) > 1:
            losses_of_several_seeds.append(row.finite_values)
    common = pairs(losses_of_several_seeds)
    notes = pilot_notes(ignored, rows)
    if common and common.differences.sd:
        gap_spread = common.differences
    else:
        # The variance of a difference of independent losses is the sum of their variances.
        gap_spread = SeedSpread(spread.sd * math.sqrt(2), spread.df)
        notes.append("no two arms of the pilot vary over common seeds: seeds count as uncorrelated")
    need = seeds_needed(goal, gap_spread)
    seeds = need["seeds"]
    exact = exact_note(seeds, goal.comparisons, goal.alpha, goal.sides) if seeds else ""
    if exact:
        notes.append(exact)
    tokens = group.rows[0].runs[0].planned_tokens
    seconds = mean_seconds(rows)
    return {
        **vars(goal),
        "pilot": comparison.title,
        "arms": [arm_numbers(row) for row in rows],
        "runs": losses + diverged,
        "diverged": diverged,
        "tokens": tokens,
        "seconds": seconds,
        **sd_numbers(spread),
        "df": spread.df,
        "correlation": common and common.correlation,
        "common_seeds": common and common.seeds,
        "need": need | total_cost(seeds, tokens, seconds),
        "notes": notes,
    }


def loss_spread(title: str, rows: list[Row]) -> SeedSpread:
    """Return the standard deviation of the finite losses of each row between seeds.

    Raises ConfigError if this standard deviation is unknown or 0.
    """
    spread = pooled([row.finite_values for row in rows])
    if spread is None:
        finished = 0
        diverged = 0
        for row in rows:
            finished += len(row.finished)
            diverged += row.diverged
        raise ConfigError(
            f"pilot={title}: no arm has two seeds with a finite loss "
            f"({finished} runs finished, {diverged} diverged); train one arm with more seeds"
        )
    if not spread.sd:
        raise ConfigError(
            f"pilot={title}: the seeds of each arm have the same loss, so power "
            "cannot be computed; choose runs with different losses"
        )
    return spread


def pilot_notes(ignored: list[Group], rows: list[Row]) -> list[str]:
    """Return notes about the rows of ignored groups, and about the held-out text of `rows`."""
    notes = []
    labels = []
    for group in ignored:
        labels += [row.label for row in group.rows]
    if labels:
        notes.append(
            f"ignored, because their settings differ from the other runs: {', '.join(labels)}"
        )
    finished = []
    for row in rows:
        finished += row.finished
    thin = thin_note(finished)
    if thin:
        notes.append(thin)
    return notes


def total_cost(seeds: int | None, tokens: int, seconds: float | None) -> dict[str, Any]:
    """Return the cost of a study with two arms; None for unknown values.

    Args:
        seeds: seeds per arm.
        tokens, seconds: cost of a run.
    """
    cost: dict[str, Any] = {"total_tokens": None, "hours": None}
    if seeds is not None:
        cost["total_tokens"] = ARMS_OF_GAP * seeds * tokens
        if seconds is not None:
            cost["hours"] = ARMS_OF_GAP * seeds * seconds / 3600
    return cost


def degrees_of_freedom(group: Group) -> int:
    """Return the degrees of freedom of the pooled standard deviation of a group's losses."""
    degrees = 0
    for row in group.rows:
        # A row without losses must not subtract 1.
        degrees += max(0, len(row.finite_values) - 1)
    return degrees


def mean_seconds(rows: list[Row]) -> float | None:
    """Return the mean time of the finished runs in seconds; None if no time is known."""
    times = []
    for row in rows:
        for run in row.finished:
            seconds = finite((run.summary or {}).get("seconds"))
            if seconds:
                times.append(seconds)
    return sum(times) / len(times) if times else None


def arm_numbers(row: Row) -> dict[str, Any]:
    losses = row.finite_values
    spread = pooled([losses])
    return {
        "arm": row.label,
        "seeds": len(losses),
        "diverged": row.diverged,
        "sd": spread.sd if spread else None,
    }


def sd_numbers(spread: SeedSpread) -> dict[str, float]:
    low, high = spread.interval
    return {"sd": spread.sd, "sd_low": low, "sd_high": high}


def seeds_needed(goal: Goal, spread: SeedSpread) -> dict[str, Any]:
    """Return how many seeds per arm a study needs, as the entry `need` of `diffllm power --json`.

    `spread` is the standard deviation between seeds of the differences between two arms. The keys
    that begin with `seeds` are numbers of seeds: one is for the estimated standard deviation, and
    one is for each confidence limit. `too_few` is the probability that a pilot of this size
    recommends too few seeds for goal.power.
    """

    def power(sd: float, seeds: int) -> float:
        return paired_power(goal.gap, sd, seeds, goal.alpha / goal.comparisons, goal.sides)

    def least(sd: float) -> int | None:
        return least_seeds(partial(power, sd), goal.power)

    def risk(sd: float, lower_power: float) -> float | None:
        return chance_of_less(power, spread, sd / spread.sd, goal.power, lower_power)

    low, high = spread.interval
    # Few pilot runs often underestimate the standard deviation. A plan from its upper limit
    # rarely has too few seeds; `too_few_by_sd` shows the risk of a plan from the estimate.
    upper = spread.upper
    planned = least(upper)
    return {
        **sd_numbers(spread),
        "sd_upper": upper,
        "df": spread.df,
        "seeds": planned,
        "seeds_by_sd": least(spread.sd),
        "seeds_low": least(low),
        "seeds_high": least(high),
        "power": power(upper, planned) if planned else None,
        "power_by_seeds": {seeds: power(upper, seeds) for seeds in POWER_SEEDS},
        "too_few": risk(upper, goal.power),
        "far_too_few": risk(upper, LOW_POWER),
        "too_few_by_sd": risk(spread.sd, goal.power),
        "far_too_few_by_sd": risk(spread.sd, LOW_POWER),
    }
