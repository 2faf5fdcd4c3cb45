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
from diffllm.metrics.records import finite
from diffllm.statistics.power_analysis import chance_of_less, least_seeds, paired_power
from diffllm.statistics.seed_variance import SeedSpread, pairs, pooled

SHOWN = (3, 5, 8, 12)
ARMS = 2
HALF = 0.5
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
    group, *others = sorted(comparison.groups, key=degrees_of_freedom, reverse=True)
    rows = [row for row in group.rows if row.ended]
    losses = [row.finite_values for row in rows]
    repeated = [values for values in losses if len(values) > 1]
    finished = [run for row in rows for run in row.finished]
    diverged = sum(row.diverged for row in rows)
    spread, common = pooled(repeated), pairs(repeated)
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
    notes = []
    if ignored := [row.label for other in others for row in other.rows]:
        notes.append(
            "ignored, because their settings differ from the other runs: " + ", ".join(ignored)
        )
    if thin := thin_note(finished):
        notes.append(thin)
    if common and common.differences.sd:
        differences = common.differences
    else:
        differences = SeedSpread(spread.sd * math.sqrt(2), spread.df)
        notes.append("no two arms of the pilot vary over common seeds: seeds count as uncorrelated")
    need = seeds_needed(goal, differences)
    if need["seeds"] and (
        note := exact_note(need["seeds"], goal.comparisons, goal.alpha, goal.sides)
    ):
        notes.append(note)
    tokens, seconds = group.rows[0].runs[0].planned_tokens, mean_seconds(rows)
    need |= total_cost(need["seeds"], tokens, seconds)
    low, high = spread.interval
    return {
        **vars(goal),
        "pilot": comparison.title,
        "arms": [arm_numbers(*arm) for arm in zip(rows, losses, strict=True)],
        "runs": sum(map(len, losses)) + diverged,
        "diverged": diverged,
        "tokens": tokens,
        "seconds": seconds,
        **{"sd": spread.sd, "sd_low": low, "sd_high": high, "df": spread.df},
        "correlation": common and common.correlation,
        "common_seeds": common and common.seeds,
        "need": need,
        "notes": notes,
    }


def total_cost(seeds: int | None, tokens: int, seconds: float | None) -> dict[str, Any]:
    """Return the cost of a study with two arms; None for unknown values.

    Args:
        seeds: seeds per arm.
        tokens, seconds: cost of a run.
    """
    cost: dict[str, Any] = {"total_tokens": None, "hours": None}
    if seeds is not None:
        cost["total_tokens"] = ARMS * seeds * tokens
        if seconds is not None:
            cost["hours"] = ARMS * seeds * seconds / 3600
    return cost


def degrees_of_freedom(group: Group) -> int:
    return sum(max(0, len(row.finite_values) - 1) for row in group.rows)


def mean_seconds(rows: list[Row]) -> float | None:
    """Return the mean time of the finished runs in seconds; None if no time is known."""
    summaries = [run.summary or {} for row in rows for run in row.finished]
    times = [x for summary in summaries if (x := finite(summary.get("seconds")))]
    return sum(times) / len(times) if times else None


def arm_numbers(row: Row, losses: dict[tuple[int, int], float]) -> dict[str, Any]:
    spread = pooled([losses])
    return {
        "arm": row.label,
        "seeds": len(losses),
        "diverged": row.diverged,
        "sd": spread.sd if spread else None,
    }


def seeds_needed(goal: Goal, spread: SeedSpread) -> dict[str, Any]:
    """Return how many seeds per arm a study needs, as the entry `need` of `diffllm power --json`.

    `spread` is the standard deviation between seeds of the differences between two arms. The keys
    that begin with `seeds` are numbers of seeds: one is for the estimated standard deviation, and
    one is for each confidence limit. `too_few` is the probability that a pilot of this size
    recommends too few seeds for goal.power.
    """

    def chance(sd: float, seeds: int) -> float:
        return paired_power(goal.gap, sd, seeds, goal.alpha / goal.comparisons, goal.sides)

    (low, high), upper = spread.interval, spread.upper
    sds = {"seeds": upper, "seeds_by_sd": spread.sd, "seeds_low": low, "seeds_high": high}
    seeds = {key: least_seeds(partial(chance, sd), goal.power) for key, sd in sds.items()}
    planned = seeds["seeds"]
    risks = {
        f"{risk}{by}": chance_of_less(chance, spread, sd / spread.sd, goal.power, less)
        for by, sd in (("", upper), ("_by_sd", spread.sd))
        for risk, less in (("too_few", goal.power), ("far_too_few", HALF))
    }
    return {
        **{"sd": spread.sd, "sd_low": low, "sd_high": high, "sd_upper": upper, "df": spread.df},
        **seeds,
        "power": chance(upper, planned) if planned else None,
        "power_by_seeds": {n: chance(upper, n) for n in SHOWN},
        **risks,
    }
