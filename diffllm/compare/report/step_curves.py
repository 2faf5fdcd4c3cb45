"""Curves of the values of every optimizer step, and their spikes.

The values are in steps.npy, the spikes in events.jsonl. Runs of older versions have only the logged
values of metrics.jsonl.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from diffllm.compare.arms.run import Run, Series
from diffllm.compare.report.curves import Array, Band, Spike, over_seeds
from diffllm.core.errors import CheckpointError
from diffllm.core.printing import to_stderr
from diffllm.metrics import table
from diffllm.metrics.events import EVENTS, read_events
from diffllm.metrics.records import LARGEST, finite
from diffllm.metrics.spikes import APART
from diffllm.metrics.steps import STEP, read_steps

NAMES = ("train/loss", "train/grad_norm", "train/lr")
"""Metrics whose figures show every step."""
INTERVALS = 1000
"""Largest number of points of a curve."""
MARKED = {"loss_spike": "train/loss", "grad_spike": "train/grad_norm"}
"""Metric whose figure marks an event, by kind of event."""


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


class RunCurves(NamedTuple):
    """Curves and spikes of a run by metric.

    `every_step` is False if the run has only logged values.
    """

    curves: dict[str, StepCurve]
    spikes: dict[str, list[Spike]]
    every_step: bool


def run_curves(run: Run, size: int = 1) -> RunCurves:
    """Return the curves of the metrics NAMES, in intervals of `size` steps, and their spikes.

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
    return RunCurves(curves, run_spikes(run, curves), len(rows) > 0)


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
        return StepCurve(*np.zeros((5, 0)))
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
    )


def run_spikes(run: Run, curves: dict[str, StepCurve]) -> dict[str, list[Spike]]:
    """Return the spikes by metric that the run counts as events, from events.jsonl.

    Runs of older versions have no such file. If the file is damaged, print a warning.
    """
    spikes: dict[str, list[Spike]] = {name: [] for name in curves}
    if not (run.path / EVENTS).exists():
        return spikes
    try:
        events = read_events(run.path)
    except CheckpointError as error:
        to_stderr(f"warning: {error}; figures do not mark the spikes of this run")
        return spikes
    for event in events:
        name = MARKED.get(event.kind)
        if name is None or event.definition != table.EVENTS:
            continue
        tokens = curves[name].tokens
        # A killed process may not have written the rows of its last events.
        if len(tokens) and event.tokens <= int(tokens[-1]):
            value = finite(event.value)
            end = event.tokens + APART * run.tokens_per_step
            height = np.inf if value is None else value
            spikes[name].append(Spike(event.step, event.tokens, end, height))
    return spikes


def unmarked(curve: StepCurve, spikes: list[Spike]) -> Array:
    """Return which intervals of a curve have no marked spike, as booleans (n,)."""
    places = np.searchsorted(curve.tokens, [spike.x for spike in spikes])
    return ~np.isin(np.arange(len(curve.tokens)), places)


def line_without(spikes: list[Spike], curve: StepCurve) -> Series:
    """Return the means of a curve, interpolated at intervals with a marked spike."""
    calm = unmarked(curve, spikes)
    values = curve.mean.copy()
    if calm.any():
        values[~calm] = np.interp(curve.tokens[~calm], curve.tokens[calm], curve.mean[calm])
    return Series(curve.tokens, values)


def band_of_values(
    lines: Sequence[Series], curves: Sequence[StepCurve], spikes: Sequence[list[Spike]]
) -> Band | None:
    """Return the mean of `lines` over seeds, and the lowest and highest value of any step and seed.

    Args:
        lines: line of each seed, such as a running mean.
        curves: values of each seed.
        spikes: marked spikes of each seed.
    """
    band = over_seeds(lines)
    lows = over_seeds(Series(curve.tokens, curve.low) for curve in curves)
    highs = over_seeds(Series(curve.tokens, curve.high) for curve in curves)
    if band is None or lows is None or highs is None:
        return None
    peaks = []
    for curve, marks in zip(curves, spikes, strict=True):
        high = np.where(unmarked(curve, marks), curve.high, np.nan)
        if np.isfinite(high).any():
            place = np.nanargmax(high)
            peaks.append((float(high[place]), int(curve.peak_steps[place])))
    return replace(
        band,
        low=np.fmin.reduce([lows.low, *lows.singles]),
        high=np.fmax.reduce([highs.high, *highs.singles]),
        spikes=tuple(chain(*spikes)),
        peak=max(peaks, default=None),
    )
