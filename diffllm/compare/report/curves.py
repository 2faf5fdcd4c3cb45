"""Curves of runs, combined over seeds, and loss gaps at equal costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import NamedTuple

import numpy as np

from diffllm.compare.arms.arm import RunArm, have_equal_tokens
from diffllm.compare.arms.budget import BUDGETS, Budget
from diffllm.compare.arms.run import EVAL_LOSS, Run, Series
from diffllm.compare.report.rows import EqualGap, Row
from diffllm.statistics.estimates import CONFIDENCE, Estimate
from diffllm.statistics.gap_tests import paired
from diffllm.statistics.seed_variance import pooled_variance

Array = np.ndarray
Losses = dict[tuple[int, int], float]
"""Losses by (seed, model.init_seed)."""
POINTS = 300


class Spike(NamedTuple):
    """The first step of a spike that a run counts as an event."""

    step: int
    x: float
    """Training tokens at the step."""
    end: float
    """Training tokens at the last step that can belong to the spike."""
    value: float
    """Value of the step; infinity if it is not finite."""


@dataclass(frozen=True)
class Band:
    """Mean and range over seeds of a metric, as curves at common x values.

    All arrays have shape (n,). `mean`, `low` and `high` are NaN at each x at which a seed
    has no value.
    """

    x: Array
    mean: Array
    low: Array
    high: Array
    singles: list[Array]
    """Curves of single seeds around each x where another seed has no value, otherwise NaN."""
    stops: list[tuple[float, float]]
    """Last finite point (x, y) of each seed whose curve ends before the last x."""
    spikes: tuple[Spike, ...] = ()
    """Marked spikes of all seeds."""
    peak: tuple[float, int] | None = None
    """Highest value without a mark, and its step; None if the step is unknown."""

    @property
    def drawn(self) -> Array:
        values = np.concatenate([self.low, self.high, *self.singles])
        return values[np.isfinite(values)]


def over_seeds(curves: Iterable[Series]) -> Band | None:
    """Return the mean and range of the curves of several seeds.

    The x values of the result are the x values of all curves together; each curve is interpolated
    linearly at these values. Return None if no curve has a finite value.
    """
    curves = [curve for curve in curves if len(curve.tokens)]
    if not any(np.isfinite(curve.values).any() for curve in curves):
        return None
    all_tokens = np.concatenate([curve.tokens for curve in curves])
    x = np.unique(all_tokens)
    interpolated = []
    for curve in curves:
        # By default, np.interp repeats the first and the last value outside of the curve.
        interpolated.append(np.interp(x, *curve, left=np.nan, right=np.nan))
    seeds = np.stack(interpolated)  # (seeds, n)
    is_incomplete = np.isnan(seeds).any(axis=0)
    # Curves of single seeds reach one point further, where they meet the mean of all seeds.
    shows_single = np.convolve(is_incomplete, [1, 1, 1])[1:-1] > 0
    singles = []
    stops = []
    for y in seeds:
        single = np.where(shows_single, y, np.nan)
        if np.isfinite(single).any():
            singles.append(single)
        finite_places = np.flatnonzero(np.isfinite(y))
        # A curve without finite values has no last point.
        if len(finite_places):
            last_place = finite_places[-1]
            if last_place < len(x) - 1:
                stops.append((x[last_place], y[last_place]))
    # The mean of the other seeds would jump where a curve ends.
    complete = np.where(is_incomplete, np.nan, seeds)
    return Band(
        x,
        mean=complete.mean(axis=0),
        low=complete.min(axis=0),
        high=complete.max(axis=0),
        singles=singles,
        stops=stops,
    )


def window(points: int) -> int:
    """Return the width of a running mean for a curve of `points` points: an odd number of points.

    The width is about 2% of the points. For fewer than 600 points, it is about 10%, at most 11.
    """
    half_width = max(points // 100, min(points // 20, 5))
    return 2 * half_width + 1


def smoothed(series: Series, points: int) -> Series:
    """Return the centred running mean of a curve over `points` points; values can be NaN."""
    if points == 1 or not len(series.values):
        return series
    # A mean over the finite values only: otherwise a single NaN would remove `points` values. The
    # mean is NaN exactly where the value is not finite.
    is_finite = np.isfinite(series.values)
    finite_values = np.where(is_finite, series.values, 0)
    total = window_sums(finite_values, points)
    count = window_sums(is_finite, points)
    means = np.where(is_finite, total / count.clip(1), np.nan)
    return Series(series.tokens, means)


def window_sums(values: Array, points: int) -> Array:
    """Return the sum of the `points` values around each of the values (n,)."""
    # mode="same" would return `points` values if there are fewer values.
    sums = np.convolve(values, np.ones(points))
    start = points // 2
    return sums[start : start + len(values)]


def at_end(row: RunArm, quantity: str) -> Band | None:
    """Return the mean and range over seeds of a metric that is logged per layer; x is the layer.

    Use the finished runs of the row, or all of its runs if no run is finished. The values are from
    the last step at which all these runs logged the metric. Return None if no such step exists.

    Args:
        quantity: name of the metric without the suffix "/layer_00".
    """
    series_by_run = {}
    for run in row.finished or row.runs:
        series = run.by_layer(quantity)
        if series.values.size:
            series_by_run[run] = series
    if not series_by_run:
        return None
    common = reduce(np.intersect1d, [series.tokens for series in series_by_run.values()])
    if not len(common):
        return None
    curves = []
    for run, series in series_by_run.items():
        is_last = series.tokens == common[-1]
        values = series.values[is_last]
        layers = np.array(run.layers(quantity))
        curves.append(Series(layers, values[-1]))
    return over_seeds(curves)


def envelope(band: Band) -> tuple[Array, Array, Array]:
    """Reduce a band to at most `POINTS` points for drawing.

    Divide the points of the band into intervals. Return three arrays with one value per interval:
    the first x, the minimum of `band.low` and the maximum of `band.high`.
    """
    points = len(band.x)
    intervals = min(points, POINTS)
    starts = np.linspace(0, points, intervals, endpoint=False).astype(int)
    # fmin and fmax ignore NaN, so that a single gap does not hide an interval.
    low = np.fmin.reduceat(band.low, starts)
    high = np.fmax.reduceat(band.high, starts)
    return band.x[starts], low, high


def gap_band(row: Row) -> Band | None:
    """Return the held-out sample loss of a row minus the loss of its baseline row.

    The x values are training tokens. Runs of the two rows are paired by seed. Return None if the
    row has no baseline, if the two rows have no common seed, or if they train on different numbers
    of tokens.
    """
    if row.baseline is None or not have_equal_tokens(row, row.baseline):
        return None
    base_curves = {run.seeds: run.series(EVAL_LOSS) for run in row.baseline.runs}
    gaps = []
    for run in row.runs:
        base = base_curves.get(run.seeds)
        if base is None:
            continue
        candidate = run.series(EVAL_LOSS)
        common = np.intersect1d(candidate.tokens, base.tokens, return_indices=True)
        tokens, candidate_places, base_places = common
        differences = candidate.values[candidate_places] - base.values[base_places]
        gaps.append(Series(tokens, differences))
    return over_seeds(gaps)


def runs_of_gap(arm: RunArm, base: RunArm) -> tuple[list[Run], list[Run]]:
    """Return the runs of both arms from which their gap is computed, with equal seeds."""
    runs = []
    base_runs = []
    for seeds, run in arm.measured.items():
        base_run = base.measured.get(seeds)
        if base_run is not None:
            runs.append(run)
            base_runs.append(base_run)
    return runs, base_runs


def sample_gaps(arm: RunArm, base: RunArm) -> dict[int, Estimate]:
    """Return the gap of two arms in held-out sample loss, by number of training tokens.

    The gap and its interval are computed like the gap of the final losses, from the same runs. A
    number of tokens is omitted if a run has no finite loss there. Return {} if the arms train on
    different numbers of tokens.
    """
    if not have_equal_tokens(arm, base):
        return {}
    runs, base_runs = runs_of_gap(arm, base)
    arm_losses = losses_by_tokens(runs)
    base_losses = losses_by_tokens(base_runs)
    gaps = {}
    for tokens in sorted(arm_losses.keys() & base_losses.keys()):
        gap = paired(arm_losses[tokens], base_losses[tokens])
        # With fewer seeds, the gap would change because other runs are compared.
        if gap is not None and gap.seeds == len(runs):
            gaps[tokens] = gap.estimate
    return gaps


def losses_by_tokens(runs: Iterable[Run]) -> dict[int, Losses]:
    """Return the finite held-out sample losses of runs by number of training tokens."""
    losses_by_count: dict[int, Losses] = {}
    for run in runs:
        curve = run.series(EVAL_LOSS)
        points = zip(curve.tokens.tolist(), curve.values.tolist(), strict=True)
        for tokens, loss in points:
            if np.isfinite(loss):
                losses = losses_by_count.setdefault(tokens, {})
                losses[run.seeds] = loss
    return losses_by_count


def rows_of_gaps(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.gap or row.is_baseline]


def seed_noise(rows: Sequence[RunArm]) -> Series | None:
    """Return half the width of the noise floor of loss gaps, as a curve over training tokens.

    The noise floor is an interval around 0. It contains 95% of the gaps between two variants whose
    expected losses are equal. It is computed from the rows with at least two seeds. Let s be the
    pooled standard deviation of the loss between seeds, n the smallest number of seeds per row, and
    t the 97.5% quantile of Student's t distribution with the degrees of freedom of s. Half the
    width is t s sqrt(2 / n). Return None if no row has two seeds.
    """
    curves_of_rows = []
    for row in rows:
        if len(row.runs) > 1:
            curves_of_rows.append([run.series(EVAL_LOSS) for run in row.runs])
    if not curves_of_rows:
        return None
    from scipy.special import stdtrit

    all_curves = chain.from_iterable(curves_of_rows)
    tokens = reduce(np.intersect1d, [curve.tokens for curve in all_curves])
    losses = []
    for curves in curves_of_rows:
        common = []
        for curve in curves:
            is_common = np.isin(curve.tokens, tokens)
            common.append(curve.values[is_common])
        losses.append(np.stack(common))  # (seeds, tokens)
    variance, degrees_of_freedom = pooled_variance(losses)
    fewest_seeds = min(map(len, losses))
    quantile = stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2)
    half_width = quantile * np.sqrt(variance * 2 / fewest_seeds)
    # A loss that is not finite makes the variance at its tokens unknown.
    is_known = np.isfinite(half_width)
    if not is_known.any():
        return None
    return Series(tokens[is_known], half_width[is_known])


def equal_gaps(arm: RunArm, base: RunArm, gap: Estimate) -> dict[str, EqualGap]:
    """Return the loss gap of two arms at equal tokens, FLOPs and seconds, by name.

    The gap at equal tokens is that of the held-out sample loss at the last common evaluation. The
    runs of a gap have completed their schedules, so at equal FLOPs or seconds, the gap is `gap`,
    that of the final losses. A budget is omitted if the costs of all these runs are not equal.
    """
    gaps = {}
    samples = sample_gaps(arm, base)
    if samples:
        tokens = max(samples)
        gaps["tokens"] = EqualGap(samples[tokens], tokens)
    runs = runs_of_gap(arm, base)
    for name in ("flops", "seconds"):
        cost = BUDGETS[name].equal_cost(runs)
        if cost is not None:
            gaps[name] = EqualGap(gap, cost)
    return gaps


def over_cost(band: Band, runs: Sequence[Run], budget: Budget) -> Band | None:
    """Return a band over tokens as a band over the mean cost of the runs of a row.

    Return None if a run does not record the cost, or if the runs have no common evaluation.
    """
    costs = []
    for run in runs:
        cost = budget.spent(run, band.x)
        if cost is None:
            return None
        costs.append(cost)
    # A run that ended early has no cost at later evaluations. The mean over the other runs could
    # be smaller there, so the band ends.
    is_measured = np.isfinite(costs).all(axis=0)
    if not is_measured.any():
        return None
    measured_costs = np.stack(costs)[:, is_measured]  # (runs, n)
    mean_costs = np.mean(measured_costs, axis=0)
    tokens = band.x[is_measured]
    stops = []
    for x, y in band.stops:
        cost_at_stop = float(np.interp(x, tokens, mean_costs))
        stops.append((cost_at_stop, y))
    return replace(
        band,
        x=mean_costs,
        mean=band.mean[is_measured],
        low=band.low[is_measured],
        high=band.high[is_measured],
        singles=[single[is_measured] for single in band.singles],
        stops=stops,
    )
