"""How much seeds vary: pooled over arms, in pairs, and as training goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diffllm.statistics.gaps import FEWEST, ROUNDING, Seed, arrays, largest
from diffllm.statistics.intervals import CONFIDENCE, t_interval


@dataclass(frozen=True)
class Spread:
    """A standard deviation and the degrees of freedom that it rests on."""

    sd: float
    df: int

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95% interval, by the chi-square distribution."""
        from scipy.special import chdtri

        tail = (1 - CONFIDENCE) / 2
        low, high = (self.sd * np.sqrt(self.df / chdtri(self.df, p)) for p in (tail, 1 - tail))
        return float(low), float(high)


def pooled(arms: Sequence[Mapping[Seed, float]]) -> Spread | None:
    """Standard deviation between the seeds of an arm, pooled over arms; None if none has two.

    It takes the arms to vary equally.
    """
    samples = [arrays(arm) for arm in arms if len(arm) > 1]
    if not samples:
        return None
    variance, df = pooled_variance(samples)
    sd = float(np.sqrt(variance))
    return Spread(0.0 if sd <= ROUNDING * largest(*samples) else sd, df)


def pooled_variance(samples: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """Variance over the first axis, pooled over samples of two values or more, and its degrees of
    freedom.

    Args:
        samples: (n, ...) each, alike but in n.
    """
    df = sum(len(sample) - 1 for sample in samples)
    squares = [((sample - sample.mean(axis=0)) ** 2).sum(axis=0) for sample in samples]
    return np.sum(squares, axis=0) / df, df


@dataclass(frozen=True)
class Pairs:
    """The gain from pairing arms by seed."""

    differences: Spread
    """The spread of the difference of two arms over seeds."""
    correlation: float | None
    """Pearson's correlation of arms over seeds, pooled over arms; None where nothing varies."""
    seeds: int


def pairs(arms: Sequence[Mapping[Seed, float]]) -> Pairs | None:
    """Variance of paired differences, by an analysis of variance of arms and seeds.

    Over the seeds that all arms have; None with fewer than two arms or seeds.
    """
    if len(arms) < 2:
        return None
    seeds = sorted(set.intersection(*(set(arm) for arm in arms)))  # type: ignore[type-var]
    if len(seeds) < 2:
        return None
    losses = np.stack([arrays({seed: arm[seed] for seed in seeds}) for arm in arms])
    centred = losses - losses.mean(axis=1, keepdims=True)
    within = float((centred**2).sum()) / (len(arms) * (len(seeds) - 1))
    rest = centred - centred.mean(axis=0)
    df = (len(arms) - 1) * (len(seeds) - 1)
    error = float((rest**2).sum()) / df
    floor = (ROUNDING * float(np.abs(losses).max())) ** 2
    sd = 0.0 if error <= floor else float(np.sqrt(2 * error))
    return Pairs(Spread(sd, df), 1 - error / within if within > floor else None, len(seeds))


@dataclass(frozen=True)
class Trend:
    """How the standard deviation between seeds changes with tokens: sd ~ tokens^slope."""

    slope: float
    low: float | None
    """Lower end of the slope's 95% interval, by leaving out one seed at a time; None from fewer
    than three seeds."""
    high: float | None
    seeds: int
    points: int

    def factor(self, tokens: float) -> float:
        """Return the factor of the standard deviation at so many times the tokens."""
        return float(tokens**self.slope)


def trend(tokens: np.ndarray, arms: Sequence[Mapping[Seed, np.ndarray]]) -> Trend | None:
    """Fit a line to the logarithm of the pooled standard deviation over that of tokens.

    Values along a run depend on each other, so that the residuals of the line say little of its
    error: it comes from leaving out each seed in turn (a jackknife).

    Args:
        tokens: (points,), rising.
        arms: loss by seed, (points,) each.

    Returns:
        None with fewer than two points, or where seeds do not vary at one of them.
    """
    whole = slope(tokens, arms)
    if whole is None:
        return None
    seeds = sorted({seed for arm in arms for seed in arm})  # type: ignore[type-var]
    without = [
        slope(tokens, [{s: y for s, y in arm.items() if s != seed} for arm in arms])
        for seed in seeds
    ]
    known = np.array([each for each in without if each is not None])
    n = len(seeds)
    if n < FEWEST or len(known) < n:
        return Trend(whole, None, None, n, len(tokens))
    error = float(np.sqrt((n - 1) / n * ((known - known.mean()) ** 2).sum()))
    return Trend(whole, *t_interval(whole, error, n - 1), n, len(tokens))


def slope(tokens: np.ndarray, arms: Sequence[Mapping[Seed, np.ndarray]]) -> float | None:
    """Slope of log sd over log tokens by least squares; None as for `trend`."""
    several = [np.stack(list(arm.values())) for arm in arms if len(arm) > 1]
    if not several or len(tokens) < 2:
        return None
    variance, _ = pooled_variance(several)
    if not (variance > 0).all():
        return None
    x = np.log(np.asarray(tokens, np.float64))
    x -= x.mean()
    return float((x * np.log(variance) / 2).sum() / (x**2).sum())
