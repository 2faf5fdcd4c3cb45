"""Curves of the values of every optimizer step, and their spikes, also over stages of training.

The values are in steps.npy, the spikes in events.jsonl. Runs of older versions have only the logged
values of metrics.jsonl.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diffllm.compare.arms.run import Run, Series, load_run
from diffllm.compare.arms.run_search import is_run
from diffllm.compare.report.curves import Array, Band, Spike, over_seeds
from diffllm.core.errors import CheckpointError
from diffllm.core.printing import to_stderr
from diffllm.core.run_files import LARGEST, RunFile, finite
from diffllm.metrics import table
from diffllm.metrics.events import read_events
from diffllm.metrics.spikes import APART
from diffllm.metrics.steps import STEP_DTYPE, read_steps

EVERY_STEP_METRICS = ("train/loss", "train/grad_norm", "train/lr")
"""Metrics whose figures show every step."""
INTERVALS = 1000
"""Largest number of points of a curve."""
MOST_STAGES = 100
"""Largest number of stages of a run; protects against a cycle of run directories."""
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
    spikes: tuple[Spike, ...] = ()
    """Marked spikes."""


class RunCurves(NamedTuple):
    """Curves of a run by metric.

    `every_step` is False if the run has only logged values.
    """

    curves: dict[str, StepCurve]
    every_step: bool


def run_curves(run: Run, size: int = 1) -> RunCurves:
    """Return the curves of EVERY_STEP_METRICS, in intervals of `size` steps, and their spikes.

    If the run has no steps.npy, or a damaged one, each logged value is an interval.
    """
    try:
        rows = read_steps(run.path / RunFile.STEPS)
    except CheckpointError as error:
        to_stderr(f"warning: {error}; figures show only the logged steps of this run")
        rows = np.zeros(0, STEP_DTYPE)
    has_every_step = len(rows) > 0
    if not has_every_step:
        size = 1
    curves = {}
    for name in EVERY_STEP_METRICS:
        curves[name] = step_curve(run, rows, name, size)
    spikes_by_metric = run_spikes(run, curves)
    for name, spikes in spikes_by_metric.items():
        curves[name] = curves[name]._replace(spikes=tuple(spikes))
    return RunCurves(curves, has_every_step)


def step_curve(run: Run, rows: Array, name: str, size: int) -> StepCurve:
    """Return the curve of one metric from the rows of steps.npy, (n,) of dtype STEP_DTYPE."""
    no_column = np.zeros(0, np.int64), np.zeros(0)
    places, values = run.metrics.columns.get(name, no_column)
    steps = run.metrics.steps[places]
    tokens = run.metrics.tokens[places]
    if len(rows):
        steps_of_rows = rows["step"].astype(np.int64)
        values_of_rows = rows[name].astype(np.float64)
        # If an older version began the run, steps.npy begins at the first step after a resume.
        is_before = steps < rows["step"][0]
        steps = np.concatenate([steps[is_before], steps_of_rows])
        tokens = np.concatenate([tokens[is_before], rows["tokens"]])
        values = np.concatenate([values[is_before], values_of_rows])
    return reduced(steps, tokens, values, size)


def reduced(steps: Array, tokens: Array, values: Array, size: int) -> StepCurve:
    """Reduce `values` (n,) at increasing `steps` (n,) to intervals of `size` steps."""
    if not len(steps):
        return StepCurve(*np.zeros((5, 0)))
    # The first step of a run is 1, so an interval ends at a multiple of `size`: intervals of all
    # runs then end at equal steps, also of runs whose steps begin after a resume.
    intervals = (steps - 1) // size
    # The smaller number in front makes the first step the start of an interval.
    increases = np.diff(intervals, prepend=intervals[0] - 1)
    starts = np.flatnonzero(increases)
    lengths = np.diff(starts, append=len(steps))
    last_places = starts + lengths - 1
    # As in `finite`, numbers beyond LARGEST count as infinite.
    is_finite = np.abs(values) <= LARGEST
    values = np.where(is_finite, values, np.nan)
    # Sums of finite values: a NaN would remove the mean of an interval.
    finite_values = np.where(is_finite, values, 0)
    total = np.add.reduceat(finite_values, starts)
    count = np.add.reduceat(is_finite.astype(np.int64), starts)
    low = np.fmin.reduceat(values, starts)
    high = np.fmax.reduceat(values, starts)
    is_peak = values == np.repeat(high, lengths)
    steps_of_peaks = np.where(is_peak, steps, 0)
    return StepCurve(
        tokens=tokens[last_places],
        mean=np.where(count > 0, total / count.clip(1), np.nan),
        low=low,
        high=high,
        peak_steps=np.maximum.reduceat(steps_of_peaks, starts),
    )


def run_spikes(run: Run, curves: dict[str, StepCurve]) -> dict[str, list[Spike]]:
    """Return the spikes by metric that the run counts as events, from events.jsonl.

    Runs of older versions have no such file. If the file is damaged, print a warning.
    """
    spikes: dict[str, list[Spike]] = {name: [] for name in curves}
    if not (run.path / RunFile.EVENTS).exists():
        return spikes
    try:
        events = read_events(run.path)
    except CheckpointError as error:
        to_stderr(f"warning: {error}; figures do not mark the spikes of this run")
        return spikes
    for event in events:
        name = MARKED.get(event.kind)
        # events.jsonl has a line per definition of a spike; the table counts only this one.
        if name is None or event.definition != table.EVENT_DEFINITION:
            continue
        tokens = curves[name].tokens
        # A killed process may not have written the rows of its last events.
        if not len(tokens) or event.tokens > int(tokens[-1]):
            continue
        value = finite(event.value)
        spike = Spike(
            step=event.step,
            x=event.tokens,
            end=event.tokens + APART * run.tokens_per_step,
            value=np.inf if value is None else value,
        )
        spikes[name].append(spike)
    return spikes


def unmarked(curve: StepCurve) -> Array:
    """Return which intervals of a curve have no marked spike, as booleans (n,)."""
    spike_tokens = [spike.x for spike in curve.spikes]
    spike_places = np.searchsorted(curve.tokens, spike_tokens)
    places = np.arange(len(curve.tokens))
    return ~np.isin(places, spike_places)


def line_without_spikes(curve: StepCurve) -> Series:
    """Return the means of a curve, interpolated at intervals with a marked spike."""
    is_calm = unmarked(curve)
    values = curve.mean
    # Without calm intervals, there is nothing to interpolate between.
    if is_calm.any():
        interpolated = np.interp(curve.tokens, curve.tokens[is_calm], values[is_calm])
        values = np.where(is_calm, values, interpolated)
    return Series(curve.tokens, values)


def band_of_values(lines: Sequence[Series], curves: Sequence[StepCurve]) -> Band | None:
    """Return the mean of `lines` over seeds, and the lowest and highest value of any step and seed.

    Args:
        lines: line of each seed, such as a running mean.
        curves: values of each seed.
    """
    band = over_seeds(lines)
    low_curves = []
    high_curves = []
    spikes: list[Spike] = []
    for curve in curves:
        low_curves.append(Series(curve.tokens, curve.low))
        high_curves.append(Series(curve.tokens, curve.high))
        spikes += curve.spikes
    lows = over_seeds(low_curves)
    highs = over_seeds(high_curves)
    if band is None or lows is None or highs is None:
        return None
    peaks = []
    for curve in curves:
        # Captions name the highest spike and, apart from it, the highest value without a mark.
        high = np.where(unmarked(curve), curve.high, np.nan)
        if np.isfinite(high).any():
            place = np.nanargmax(high)
            peak_step = int(curve.peak_steps[place])
            peaks.append((float(high[place]), peak_step))
    # Where a seed has no value, `low` and `high` are NaN, and single seeds have the values.
    lowest = np.fmin.reduce([lows.low, *lows.singles])
    highest = np.fmax.reduce([highs.high, *highs.singles])
    return replace(
        band,
        low=lowest,
        high=highest,
        spikes=tuple(spikes),
        peak=max(peaks, default=None),
    )


def stages_of(run: Run) -> list[tuple[Run, int]]:
    """Return the stages up to `run`, oldest first, with the tokens before each stage.

    The list begins after the newest stage whose directory is missing or damaged.
    """
    stages = [(run, tokens_before(run))]
    previous = previous_run(run)
    while previous is not None and len(stages) < MOST_STAGES:
        stages.insert(0, (previous, tokens_before(previous)))
        previous = previous_run(previous)
    return stages


def tokens_before(run: Run) -> int:
    """Return the training tokens of all stages before a run."""
    previous = run.facts.get("previous")
    if not previous:
        return 0
    return previous.get("tokens") or 0


def previous_run(run: Run) -> Run | None:
    """Read the run whose checkpoint this run continued.

    Relative paths start at the current directory, or at the directory that contains `run`. Return
    None for a first stage, and if the previous run is missing or damaged.
    """
    previous = run.facts.get("previous")
    if not previous:
        return None
    # The recorded path is that of a checkpoint, RUN/checkpoints/STEP.
    recorded_path = Path(previous["path"]).parent.parent
    for path in (recorded_path, run.path.parent / recorded_path.name):
        # The second path is the run itself if an earlier stage elsewhere has the same name.
        if is_run(path) and path.resolve() != run.path.resolve():
            with suppress(CheckpointError):
                return load_run(path)
            return None
    return None


def over_stages(curves: list[StepCurve], starts: list[int]) -> StepCurve:
    """Return one curve over the tokens of all stages, from the curve of each stage.

    The next stage may start from a checkpoint before the end of a stage. Later steps of the stage
    are then not part of the training.

    Args:
        starts: number of tokens before each stage, see `stages_of`.
    """
    arrays_of_stages = []
    spikes = []
    ends = [*starts[1:], np.inf]
    for curve, start, end in zip(curves, starts, ends, strict=True):
        tokens = curve.tokens + start
        is_trained = tokens <= end
        arrays = (tokens, curve.mean, curve.low, curve.high, curve.peak_steps)
        arrays_of_stages.append([array[is_trained] for array in arrays])
        for spike in curve.spikes:
            spike_start = spike.x + start
            spike_end = spike.end + start
            if spike_start <= end:
                spikes.append(spike._replace(x=spike_start, end=spike_end))
    joined = map(np.concatenate, zip(*arrays_of_stages, strict=True))
    tokens, mean, low, high, peak_steps = joined
    return StepCurve(tokens, mean, low, high, peak_steps, tuple(spikes))
