"""95% intervals over seeds, by Student's t."""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from diffllm.report.comparison import Estimate

CONFIDENCE = 0.95


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of n independent values and its t interval, mean ± t(n - 1) s / sqrt(n).

    s is the sample standard deviation (n - 1 in the denominator). A single value has no interval.

    Raises:
        ValueError: there is no value.
    """
    if not len(values):
        raise ValueError("an estimate needs at least one value")
    sample = np.asarray(values, dtype=np.float64)
    n, mean = len(sample), float(sample.mean())
    if n == 1:
        return Estimate(mean)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    half = float(quantile * sample.std(ddof=1) / np.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n)


def paired_gap(
    values: Mapping[tuple[int, int], float], baseline: Mapping[tuple[int, int], float]
) -> Estimate | None:
    """Mean of value - baseline over the seeds that both have, and its paired t interval.

    Runs of one seed see the same samples in the same order and start from the same initial values,
    whatever their variant. What that draw adds to the loss of both is no part of their difference,
    so the differences of the pairs are the sample: an interval for two independent groups would
    count the noise that they share twice, and come out too wide.

    Args:
        values, baseline: loss by (seed, model.init_seed).

    Returns:
        None where no seed is common.
    """
    common = sorted(values.keys() & baseline.keys())
    return estimate([values[seed] - baseline[seed] for seed in common]) if common else None
