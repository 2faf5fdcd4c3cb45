"""A pilot, finished runs that show how much seeds vary, and what a gap takes according to it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from diffllm.compare.report.comparison import read
from diffllm.compare.report.groups import Group
from diffllm.compare.report.numbers import finite
from diffllm.compare.report.rows import Row
from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import ConfigError
from diffllm.statistics.gap_tests import ALPHA
from diffllm.statistics.power_analysis import least_seeds, paired_power, welch_power
from diffllm.statistics.seed_variance import Pairs, SeedSpread, pairs, pooled

SHOWN = (3, 5, 8, 12)
ARMS = 2


@dataclass(frozen=True)
class PilotArm:
    label: str
    losses: dict[tuple[int, int], float]
    diverged: int

    @property
    def sd(self) -> float | None:
        found = pooled([self.losses])
        return found.sd if found else None


@dataclass(frozen=True)
class Pilot:
    title: str
    arms: list[PilotArm]
    spread: SeedSpread
    """Nats per token."""
    pairs: Pairs | None
    tokens: int
    """Per run."""
    seconds: float | None
    """Per run; None if unknown."""
    notes: list[str]

    @property
    def diverged(self) -> int:
        return sum(arm.diverged for arm in self.arms)

    @property
    def runs(self) -> int:
        return sum(len(arm.losses) for arm in self.arms) + self.diverged


def read_pilot(paths: list[Path]) -> Pilot:
    """Read the comparable group of which most is known; raises ConfigError without two seeds."""
    comparison, _ = read(paths)

    def degrees_of_freedom(group: Group) -> int:
        return sum(max(0, len(finite_losses(row)) - 1) for row in group.rows)

    groups = sorted(comparison.groups, key=degrees_of_freedom, reverse=True)
    rows = groups[0].rows
    arms = [PilotArm(row.label, finite_losses(row), row.diverged) for row in rows if row.ended]
    several = [arm.losses for arm in arms if len(arm.losses) > 1]
    spread = pooled(several)
    if spread is None:
        finished = sum(len(row.finished) for row in rows)
        raise ConfigError(
            f"pilot: {comparison.title} needs at least 2 seeds of an arm with a finite loss; "
            f"finished runs: {finished}, diverged: {sum(arm.diverged for arm in arms)}"
        )
    if not spread.sd:
        raise ConfigError(
            f"pilot: the seeds of {comparison.title} do not vary at all; no power follows"
        )
    ended = [run.summary or {} for row in rows for run in row.finished]
    seconds = [x for summary in ended if (x := finite(summary.get("seconds")))]
    left_out = [row.label for group in groups[1:] for row in group.rows]
    note = f"left out, since they cannot be compared with the others: {', '.join(left_out)}"
    return Pilot(
        comparison.title,
        arms,
        spread,
        pairs(several),
        rows[0].runs[0].planned_tokens,
        float(np.mean(seconds)) if seconds else None,
        [note] if left_out else [],
    )


def finite_losses(row: Row) -> dict[tuple[int, int], float]:
    return {seed: loss for seed, loss in row.losses.items() if loss is not None}


@dataclass(frozen=True)
class Wanted:
    gap: float = field(metadata={"above": 0, "below": math.inf})
    """Nats per token."""
    alpha: float = bounded(ALPHA, above=0, below=1)
    power: float = bounded(0.8, above=0, below=1)
    sides: int = bounded(2, least=1, most=2)
    comparisons: int = bounded(1, least=1)
    """Gaps of one family, for Holm's correction."""

    def __post_init__(self) -> None:
        check_bounds("", self)
        if self.power <= self.alpha:
            raise ConfigError(f"power={self.power:g} must lie between alpha={self.alpha:g} and 1")


@dataclass(frozen=True)
class Need:
    design: str
    """unpaired or paired."""
    sd: float
    sd_low: float
    sd_high: float
    seeds: int | None
    """Per arm; None above the largest number tried."""
    seeds_low: int | None
    seeds_high: int | None
    power: float | None
    power_by_seeds: dict[int, float]
    total_tokens: int | None
    """Of both arms."""
    hours: float | None
    """Of both arms, one run after another."""


def needs(pilot: Pilot, wanted: Wanted) -> list[Need]:
    found = [need(pilot, wanted, "unpaired", pilot.spread, welch_power)]
    if pilot.pairs and pilot.pairs.differences.sd:
        found.append(need(pilot, wanted, "paired", pilot.pairs.differences, paired_power))
    return found


def need(
    pilot: Pilot, wanted: Wanted, design: str, spread: SeedSpread, test: Callable[..., float]
) -> Need:
    def power(sd: float, seeds: int) -> float:
        return test(wanted.gap, sd, seeds, wanted.alpha / wanted.comparisons, wanted.sides)

    def least(sd: float) -> int | None:
        return least_seeds(lambda seeds: power(sd, seeds), wanted.power)

    sd, (low, high) = spread.sd, spread.interval
    seeds = least(sd)
    runs = ARMS * seeds if seeds else None
    return Need(
        design,
        sd,
        low,
        high,
        seeds,
        least(low),
        least(high),
        power(sd, seeds) if seeds else None,
        {n: power(sd, n) for n in SHOWN},
        runs * pilot.tokens if runs else None,
        runs * pilot.seconds / 3600 if runs and pilot.seconds else None,
    )
