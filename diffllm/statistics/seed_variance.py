"""Standard deviation of runs over seeds, and of differences between two variants over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diffllm.statistics.estimates import CONFIDENCE, ROUNDING
from diffllm.statistics.gap_tests import Seed, in_seed_order, largest_magnitude

UPPER = 0.8
"""Confidence of the upper limit that is used to plan the number of seeds."""


@dataclass(frozen=True)
class SeedSpread:
    """Estimated standard deviation over seeds, with the degrees of freedom of the estimate."""

    sd: float
    df: int

    @property
    def interval(self) -> tuple[float, float]:
        """95% chi-square confidence interval (low, high) of the standard deviation."""
        from scipy.special import chdtri

        tail = (1 - CONFIDENCE) / 2
        # `chdtri` returns upper quantiles, so the larger quantile gives the lower end.
        upper_quantile = chdtri(self.df, tail)
        lower_quantile = chdtri(self.df, 1 - tail)
        low = self.sd * np.sqrt(self.df / upper_quantile)
        high = self.sd * np.sqrt(self.df / lower_quantile)
        return float(low), float(high)

    @property
    def upper(self) -> float:
        """Upper one-sided 80% confidence limit of the standard deviation.

        If the number of seeds of a study is computed from this limit, the study has at least the
        planned power with a probability of 80% (Browne, Statistics in Medicine 14, 1995).
        """
        from scipy.special import chdtri

        quantile = chdtri(self.df, UPPER)
        return self.sd * float(np.sqrt(self.df / quantile))


def pooled(arms: Sequence[Mapping[Seed, float]]) -> SeedSpread | None:
    """Return the standard deviation over seeds within a variant, pooled over all variants.

    `arms` contains, for each variant, the value of each run by seed. Return None if no variant has
    at least two seeds.
    """
    samples = [in_seed_order(arm) for arm in arms if len(arm) > 1]
    if not samples:
        return None
    variance, df = pooled_variance(samples)
    sd = float(np.sqrt(variance))
    # The mean of equal values can differ from them in the last bit.
    if sd <= ROUNDING * largest_magnitude(*samples):
        sd = 0.0
    return SeedSpread(sd, df)


def pooled_variance(samples: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """Return (variance, degrees of freedom): variance over the first axis, pooled over `samples`.

    Args:
        samples: arrays (n, ...). The length n is at least 2 and can vary between samples.
    """
    df = 0
    squares = []
    for sample in samples:
        deviations = sample - sample.mean(axis=0)
        squares.append((deviations**2).sum(axis=0))
        df += len(sample) - 1
    return np.sum(squares, axis=0) / df, df


@dataclass(frozen=True)
class Pairs:
    """Standard deviation of the differences between two variants over common seeds.

    `differences` is this standard deviation, and `correlation` is the correlation between two
    variants over seeds. Both are pooled over all pairs of variants. If the values do not vary,
    `correlation` is None. `seeds` is the number of seeds that all variants have in common.
    """

    differences: SeedSpread
    correlation: float | None
    seeds: int


def pairs(arms: Sequence[Mapping[Seed, float]]) -> Pairs | None:
    """Return the standard deviation of the differences between two variants over common seeds.

    The standard deviation is pooled over all pairs of variants. Only seeds that all variants have
    are used. Return None with fewer than two such seeds, or with fewer than two variants.

    Args:
        arms: for each variant, the value of each run by seed, such as the final loss.
    """
    if len(arms) < 2:
        return None
    seeds = set.intersection(*map(set, arms))
    if len(seeds) < 2:
        return None
    rows = []
    for arm in arms:
        values = {seed: arm[seed] for seed in seeds}
        rows.append(in_seed_order(values))
    losses = np.stack(rows)  # (arms, seeds)
    centred = losses - losses.mean(axis=1, keepdims=True)
    df_within = len(arms) * (len(seeds) - 1)
    within = float((centred**2).sum()) / df_within
    # The residual of a two-way analysis of variance, arms by seeds. The variance of a difference of
    # two arms, averaged over all pairs of arms, is twice the variance of this residual.
    residuals = centred - centred.mean(axis=0)
    df = (len(arms) - 1) * (len(seeds) - 1)
    error = float((residuals**2).sum()) / df
    # Variances below this floor are rounding errors of equal values.
    floor = (ROUNDING * float(np.abs(losses).max())) ** 2
    sd = float(np.sqrt(2 * error))
    if error <= floor:
        sd = 0.0
    correlation = None
    if within > floor:
        correlation = 1 - error / within
    return Pairs(SeedSpread(sd, df), correlation, len(seeds))
