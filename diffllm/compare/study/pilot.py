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
"""Numbers of seeds whose power is listed."""
ARMS = 2


@dataclass(frozen=True)
class PilotArm:
    label: str
    losses: dict[tuple[int, int], float]
    """Final held-out loss of the runs that ended finite, by seed."""
    diverged: int

    @property
    def sd(self) -> float | None:
        found = pooled([self.losses])
        return found.sd if found else None


@dataclass(frozen=True)
class Pilot:
    """The spread of seeds in runs that were made, and what a run costs."""

    title: str
    arms: list[PilotArm]
    spread: SeedSpread
    """Between the seeds of an arm, nats a token."""
    pairs: Pairs | None
    """None where fewer than two arms share two seeds."""
    tokens: int
    """Tokens of a run."""
    seconds: float | None
    """Seconds of a run, all its starts together, mean over finished runs; None where unknown."""
    notes: list[str]

    @property
    def diverged(self) -> int:
        return sum(arm.diverged for arm in self.arms)

    @property
    def runs(self) -> int:
        return sum(len(arm.losses) for arm in self.arms) + self.diverged


def read_pilot(paths: list[Path]) -> Pilot:
    """The pilot in runs, sweeps or globs of them; raises ConfigError where it says nothing.

    Of runs that cannot be compared with each other it takes those of which most is known.
    """
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
    """The gap to be found, and how surely; raises ConfigError."""

    gap: float = field(metadata={"above": 0, "below": math.inf})
    """Nats a token, without a sign."""
    alpha: float = bounded(ALPHA, above=0, below=1)
    power: float = bounded(0.8, above=0, below=1)
    sides: int = bounded(2, least=1, most=2)
    comparisons: int = bounded(1, least=1)
    """Gaps of one family: the first step of Holm's correction divides alpha by it."""

    def __post_init__(self) -> None:
        check_bounds("", self)
        if self.power <= self.alpha:
            raise ConfigError(f"power={self.power:g} must lie between alpha={self.alpha:g} and 1")


@dataclass(frozen=True)
class Need:
    """Seeds, tokens and hours of one design."""

    design: str
    """unpaired (Welch's test) or paired."""
    sd: float
    """Standard deviation between seeds, or of the differences of pairs."""
    sd_low: float
    sd_high: float
    seeds: int | None
    """Seeds of each arm; None beyond what is looked for."""
    seeds_low: int | None
    """Seeds of each arm by the lower end of the standard deviation's interval."""
    seeds_high: int | None
    power: float | None
    """Chance of finding the gap with `seeds`."""
    power_by_seeds: dict[int, float]
    total_tokens: int | None
    """Tokens of both arms."""
    hours: float | None
    """Hours of both arms on the pilot's machine, one run after another."""


def needs(pilot: Pilot, wanted: Wanted) -> list[Need]:
    """Compute the need of each design for runs of the pilot's length."""
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
