"""A pilot, finished runs that show how much seeds vary, and what a gap takes according to it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
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
from diffllm.statistics.seed_variance import Pairs, SeedSpread, Trend, pairs, pooled, trend

FIRST = 0.2
"""Share of a run whose evaluations say nothing of how the spread falls later."""
FEWEST_POINTS = 4
"""Evaluations behind it that a trend takes."""
WIDEST = 0.5
"""Half width of a trend's interval from which on it tells nothing: at 4 times the tokens the
spread would be known within a factor of 2 either way."""
STEEPEST = 10.0
"""Slope beyond which a trend is not extrapolated."""
FACTORS = (1, 2, 4)
"""Lengths of a run, as multiples of the pilot's, where the trend tells the spread."""
SHOWN = (3, 5, 8, 12)
"""Numbers of seeds whose power is listed."""
ARMS = 2


@dataclass(frozen=True)
class PilotArm:
    """A row of the pilot."""

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
    trend: Trend | None
    no_trend: str
    """Why the trend cannot be told; "" if it can."""
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
    groups = sorted(comparison.groups, key=lambda group: -freedom(group))
    rows = groups[0].rows
    arms = [arm_of(row) for row in rows if row.ended]
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
    found, why = trend_of(rows)
    ended = [run.summary or {} for row in rows for run in row.finished]
    seconds = [x for summary in ended if (x := finite(summary.get("seconds")))]
    left_out = [row.label for group in groups[1:] for row in group.rows]
    note = f"left out, since they cannot be compared with the others: {', '.join(left_out)}"
    return Pilot(
        comparison.title,
        arms,
        spread,
        pairs(several),
        found,
        why,
        rows[0].runs[0].planned_tokens,
        float(np.mean(seconds)) if seconds else None,
        [note] if left_out else [],
    )


def arm_of(row: Row) -> PilotArm:
    finite = {seed: loss for seed, loss in row.losses.items() if loss is not None}
    return PilotArm(row.label, finite, row.diverged)


def freedom(group: Group) -> int:
    """Degrees of freedom that the spread of a group's seeds rests on."""
    return sum(max(0, len(arm_of(row).losses) - 1) for row in group.rows)


def trend_of(rows: list[Row]) -> tuple[Trend | None, str]:
    """How the spread of held-out loss changes with tokens, or why that cannot be told."""
    series = [
        {run.seeds: run.series("eval/loss") for run in row.finished if run.final_loss is not None}
        for row in rows
    ]
    series = [arm for arm in series if len(arm) > 1]
    tokens = reduce(np.intersect1d, [each.tokens for arm in series for each in arm.values()])
    tokens = tokens[tokens >= FIRST * tokens.max(initial=0)]
    if len(tokens) < FEWEST_POINTS:
        return None, (
            f"it takes {FEWEST_POINTS} evaluations after the first fifth of a run, these have "
            f"{len(tokens)}: lower eval.interval"
        )
    curves = [
        {seed: each.values[np.isin(each.tokens, tokens)] for seed, each in arm.items()}
        for arm in series
    ]
    found = trend(tokens, curves)
    if found is None:
        return None, "the evaluations of seeds do not vary"
    if found.low is None or found.high is None:
        return None, f"it takes 3 seeds or more, these are {found.seeds}"
    if abs(found.slope) > STEEPEST:
        return None, f"sd ~ tokens^{found.slope:.2f} is too steep to hold at other lengths"
    if found.high - found.low > 2 * WIDEST:
        return None, (
            f"sd ~ tokens^{found.slope:.2f} with a 95% interval from {found.low:.2f} to "
            f"{found.high:.2f}, too wide: it takes more seeds"
        )
    return found, ""


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
    """Seeds, tokens and hours of one design at one length of runs."""

    design: str
    """unpaired (Welch's test) or paired."""
    factor: int
    """Length of a run over the pilot's."""
    tokens: int
    """Tokens of a run."""
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
    """Reckon each design at the pilot's length and, where the trend can be told, at others."""
    designs: list[tuple[str, SeedSpread, Callable[..., float]]] = [
        ("unpaired", pilot.spread, welch_power)
    ]
    if pilot.pairs and pilot.pairs.differences.sd:
        designs.append(("paired", pilot.pairs.differences, paired_power))
    factors = FACTORS if pilot.trend else FACTORS[:1]
    return [
        need(pilot, wanted, factor, design, spread, test)
        for factor in factors
        for design, spread, test in designs
    ]


def need(
    pilot: Pilot,
    wanted: Wanted,
    factor: int,
    design: str,
    spread: SeedSpread,
    test: Callable[..., float],
) -> Need:
    """Reckon one design at one length.

    The ends of the standard deviation's interval at another length go by those of the slope, too.
    """
    low, high = spread.interval
    sd, found = spread.sd, pilot.trend
    if found and found.low is not None and found.high is not None:
        sd, low, high = (
            sd * found.factor(factor),
            low * factor**found.low,
            high * factor**found.high,
        )

    def power(sd: float, seeds: int) -> float:
        return test(wanted.gap, sd, seeds, wanted.alpha / wanted.comparisons, wanted.sides)

    def least(sd: float) -> int | None:
        return least_seeds(lambda seeds: power(sd, seeds), wanted.power)

    seeds, tokens = least(sd), factor * pilot.tokens
    runs = ARMS * seeds if seeds else None
    return Need(
        design,
        factor,
        tokens,
        sd,
        low,
        high,
        seeds,
        least(low),
        least(high),
        power(sd, seeds) if seeds else None,
        {n: power(sd, n) for n in SHOWN},
        runs * tokens if runs else None,
        runs * factor * pilot.seconds / 3600 if runs and pilot.seconds else None,
    )
