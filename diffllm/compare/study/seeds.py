"""How many seeds, tokens and hours a gap takes, from what a pilot says of seeds."""

from collections.abc import Callable
from dataclasses import dataclass

from diffllm.compare.study.pilot import Pilot
from diffllm.core.errors import ConfigError
from diffllm.statistics.gap_tests import ALPHA
from diffllm.statistics.power_analysis import least_seeds, paired_power, welch_power
from diffllm.statistics.seed_variance import SeedSpread

FACTORS = (1, 2, 4)
"""Lengths of a run, as multiples of the pilot's, where the trend tells the spread."""
SHOWN = (3, 5, 8, 12)
"""Numbers of seeds whose power is listed."""
ARMS = 2


@dataclass(frozen=True)
class Wanted:
    """The gap to be found, and how surely; raises ConfigError."""

    gap: float
    """Nats a token."""
    alpha: float = ALPHA
    power: float = 0.8
    sides: int = 2
    comparisons: int = 1
    """Gaps of one family: the first step of Holm's correction divides alpha by it."""

    def __post_init__(self) -> None:
        if not 0 < self.gap < float("inf"):
            raise ConfigError(f"gap={self.gap:g} must be above 0: nats a token, without a sign")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha={self.alpha:g} must lie between 0 and 1")
        if not self.alpha < self.power < 1:
            raise ConfigError(f"power={self.power:g} must lie between alpha={self.alpha:g} and 1")
        if self.sides not in (1, 2):
            raise ConfigError(f"sides={self.sides} must be 1 or 2")
        if self.comparisons < 1:
            raise ConfigError(f"comparisons={self.comparisons} must be 1 or more")


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
