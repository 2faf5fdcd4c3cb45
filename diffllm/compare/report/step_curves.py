"""Curves of the values of every optimizer step, and their spikes.

The values are in steps.npy. Runs of older versions have only the logged values of metrics.jsonl.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from diffllm.compare.report.curves import Array, Band, Spike, over_seeds
from diffllm.compare.report.runs import Run, Series
from diffllm.core.errors import CheckpointError
from diffllm.core.printing import to_stderr
from diffllm.metrics.records import LARGEST
from diffllm.metrics.steps import STEP, read_steps

NAMES = ("train/loss", "train/grad_norm", "train/lr")
"""Metrics whose figures show every step."""
INTERVALS = 1000
"""Largest number of points of a curve."""
SIDE = 8
"""Number of intervals on each side with which a spike is compared."""
FACTOR = 6
"""A spike is this multiple of the median distance: 4 standard deviations of normal noise."""
SMALLEST = 0.05
"""Smallest height of a spike: in nats, or as a share of a gradient norm."""


class StepCurve(NamedTuple):
    """Values of a metric, reduced to intervals of equally many steps; arrays have shape (n,).

    Values that are not finite are omitted; an interval without finite values has NaN.
    """

    tokens: Array
    """Training tokens at the last step of an interval."""
    mean: Array
    low: Array
    high: Array
    peak_steps: Array
    """Step of the highest value."""
    peak_tokens: Array
    """Training tokens at the step of the highest value."""


class RunCurves(NamedTuple):
    """Curves of a run by metric. `every_step` is False if the run has only logged values."""

    curves: dict[str, StepCurve]
    every_step: bool


def run_curves(run: Run, size: int = 1) -> RunCurves:
    """Return the curves of the metrics NAMES, in intervals of `size` steps.

    If the run has no steps.npy, or a damaged one, each logged value is an interval.
    """
    try:
        rows = read_steps(run.path / "steps.npy")
    except CheckpointError as error:
        to_stderr(f"warning: {error}; figures show only the logged steps of this run")
        rows = np.zeros(0, STEP)
    if not len(rows):
        size = 1
    curves = {name: step_curve(run, rows, name, size) for name in NAMES}
    return RunCurves(curves, len(rows) > 0)


def step_curve(run: Run, rows: Array, name: str, size: int) -> StepCurve:
    """Return the curve of one metric from the rows of steps.npy, (n,) of dtype STEP."""
    places, values = run.metrics.columns.get(name, (np.zeros(0, np.int64), np.zeros(0)))
    steps, tokens = run.metrics.steps[places], run.metrics.tokens[places]
    if len(rows):
        # If an older version began the run, steps.npy begins at the first step after a resume.
        before = steps < rows["step"][0]
        steps = np.concatenate([steps[before], rows["step"].astype(np.int64)])
        tokens = np.concatenate([tokens[before], rows["tokens"]])
        values = np.concatenate([values[before], rows[name].astype(np.float64)])
    return reduced(steps, tokens, values, size)


def reduced(steps: Array, tokens: Array, values: Array, size: int) -> StepCurve:
    """Reduce `values` (n,) at increasing `steps` (n,) to intervals of `size` steps."""
    if not len(steps):
        return StepCurve(*np.zeros((6, 0)))
    intervals = (steps - 1) // size
    starts = np.flatnonzero(np.diff(intervals, prepend=intervals[0] - 1))
    lengths = np.diff(starts, append=len(steps))
    finite = np.abs(values) <= LARGEST
    values = np.where(finite, values, np.nan)
    total = np.add.reduceat(np.where(finite, values, 0), starts)
    count = np.add.reduceat(finite.astype(np.int64), starts)
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    peak = values == np.repeat(high, lengths)
    return StepCurve(
        tokens[starts + lengths - 1],
        np.where(count > 0, total / count.clip(1), np.nan),
        low,
        high,
        np.maximum.reduceat(np.where(peak, steps, 0), starts),
        np.maximum.reduceat(np.where(peak, tokens, 0), starts),
    )


def line_without(spikes: list[Spike], curve: StepCurve) -> Series:
    """Return the means of a curve, interpolated at intervals with one of the spikes."""
    spiky = np.isin(curve.peak_steps, [spike.step for spike in spikes])
    calm = ~spiky
    values = curve.mean.copy()
    if spikes:
        values[spiky] = np.interp(curve.tokens[spiky], curve.tokens[calm], curve.mean[calm])
    return Series(curve.tokens, values)


def band_of_values(curves: Sequence[StepCurve]) -> Band | None:
    """Return the mean over seeds, and the smallest and largest value of any step and seed."""
    band = over_seeds(Series(curve.tokens, curve.mean) for curve in curves)
    lows = over_seeds(Series(curve.tokens, curve.low) for curve in curves)
    highs = over_seeds(Series(curve.tokens, curve.high) for curve in curves)
    if band is None or lows is None or highs is None:
        return None
    return replace(band, low=lows.low, high=highs.high)


def spikes_of(curve: StepCurve, log: bool) -> list[Spike]:
    """Return the highest step of each interval that is far above the intervals on both sides.

    Compare the highest value of an interval with the medians of the highest values of the SIDE
    intervals before it and after it. The descent of a loss is therefore no spike.

    Args:
        log: whether to compare logarithms, as for gradient norms; values of 0 are omitted.
    """
    high = np.log(np.where(curve.high > 0, curve.high, np.nan)) if log else curve.high
    if not np.isfinite(high).any():
        return []
    padding = np.full(SIDE, np.nan)
    before = medians(np.concatenate([padding, high[:-1]]))
    after = medians(np.concatenate([high[1:], padding]))
    height = high - np.fmax(before, after)
    level = np.fmin(before, after)
    # The first interval has nothing before it, and the descent begins there.
    judged = np.isfinite(before) & np.isfinite(height)
    if not judged.any():
        return []
    limit = max(FACTOR * float(np.median(np.abs(height[judged]))), SMALLEST)
    if log:
        level = np.exp(level)
    return [
        Spike(
            int(curve.peak_steps[i]), *map(float, (curve.peak_tokens[i], level[i], curve.high[i]))
        )
        for i in np.flatnonzero(judged & (height > limit))
    ]


def medians(values: Array) -> Array:
    """Return the medians of the finite values in each window of SIDE values; NaN without any."""
    windows = np.lib.stride_tricks.sliding_window_view(values, SIDE)
    filled = np.isfinite(windows).any(axis=1)
    result = np.full(len(windows), np.nan)
    result[filled] = np.nanmedian(windows[filled], axis=1)
    return result
