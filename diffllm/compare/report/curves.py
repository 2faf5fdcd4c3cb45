"""Curves of runs, combined over seeds, and loss gaps at equal cost."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from diffllm.compare.arms.run import (
    Run,
    Series,
    flops_facts,
    keys_seen,
)
from diffllm.compare.report.rows import EqualGap, Row
from diffllm.metrics.facts import machine_facts
from diffllm.statistics.estimates import CONFIDENCE, Estimate, estimate
from diffllm.statistics.gap_tests import paired
from diffllm.statistics.seed_variance import pooled_variance

Array = np.ndarray
Losses = dict[tuple[int, int], float]
"""Losses by (seed, model.init_seed)."""
LOSS = "eval/loss"
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
    x = np.unique(np.concatenate([curve.tokens for curve in curves]))
    seeds = np.stack([np.interp(x, *curve, left=np.nan, right=np.nan) for curve in curves])
    alone = np.isnan(seeds).any(axis=0)
    # Curves of single seeds reach one point further, where they meet the mean of all seeds.
    beside = np.convolve(alone, [1, 1, 1])[1:-1] > 0
    singles = [y for y in np.where(beside, seeds, np.nan) if np.isfinite(y).any()]
    last = [np.flatnonzero(np.isfinite(y))[-1:] for y in seeds]
    stops = [(x[i], y[i]) for y, at in zip(seeds, last, strict=True) for i in at if i < len(x) - 1]
    together = np.where(alone, np.nan, seeds)
    mean, low, high = together.mean(axis=0), together.min(axis=0), together.max(axis=0)
    return Band(x, mean, low, high, singles, stops)


def window(points: int) -> int:
    return 2 * max(points // 100, min(points // 20, 5)) + 1


def smoothed(series: Series, points: int) -> Series:
    known, n = np.isfinite(series.values), len(series.values)
    if points == 1 or not n:
        return series
    total, count = (
        np.convolve(values, np.ones(points))[points // 2 : points // 2 + n]
        for values in (np.where(known, series.values, 0), known)
    )
    return Series(series.tokens, np.where(known, total / count.clip(1), np.nan))


def at_end(row: Row, quantity: str) -> Band | None:
    """Return the mean and range over seeds of a metric that is logged per layer; x is the layer.

    Use the finished runs of the row, or all of its runs if no run is finished. The values are from
    the last step at which all these runs logged the metric. Return None if no such step exists.

    Args:
        quantity: name of the metric without the suffix "/layer_00".
    """
    runs = row.finished or row.runs
    logged = [(run.layers(quantity), run.by_layer(quantity)) for run in runs]
    logged = [(layers, series) for layers, series in logged if series.values.size]
    common = reduce(np.intersect1d, [s.tokens for _, s in logged]) if logged else np.zeros(0)
    if not len(common):
        return None
    return over_seeds(
        Series(np.array(layers), series.values[series.tokens == common[-1]][-1])
        for layers, series in logged
    )


def envelope(band: Band) -> tuple[Array, Array, Array]:
    """Reduce a band to at most `POINTS` points for drawing.

    Divide the points of the band into intervals. Return three arrays with one value per interval:
    the first x, the minimum of `band.low` and the maximum of `band.high`.
    """
    n = len(band.x)
    starts = np.linspace(0, n, min(n, POINTS), endpoint=False).astype(int)
    low, high = np.fmin.reduceat(band.low, starts), np.fmax.reduceat(band.high, starts)
    return band.x[starts], low, high


def gap_band(row: Row) -> Band | None:
    """Return the held-out sample loss of a row minus the loss of its baseline row.

    The x values are training tokens. Runs of the two rows are paired by seed. Return None if the
    row has no baseline, or if the two rows have no common seed.
    """
    if row.baseline is None:
        return None
    of_seeds = {run.seeds: run.series(LOSS) for run in row.baseline.runs}
    gaps = []
    for own, other in ((run.series(LOSS), of_seeds.get(run.seeds)) for run in row.runs):
        if other is not None:
            tokens, i, j = np.intersect1d(own.tokens, other.tokens, return_indices=True)
            gaps.append(Series(tokens, own.values[i] - other.values[j]))
    return over_seeds(gaps)


def pairs_of_gap(row: Row) -> list[tuple[Run, Run]]:
    """Return the runs from which `row.gap` is computed, with the baseline run of the same seed."""
    bases = row.baseline.measured if row.baseline else {}
    return [(run, bases[seeds]) for seeds, run in row.measured.items() if seeds in bases]


def sample_gaps(row: Row) -> dict[int, Estimate]:
    """Return the gap of a row in held-out sample loss, by number of training tokens.

    The gap and its interval are computed like `row.gap`, from the same runs. A number of tokens is
    omitted if a run has no finite loss there.
    """
    losses: dict[int, tuple[Losses, Losses]] = {}
    pairs = pairs_of_gap(row)
    for pair in pairs:
        for side, run in enumerate(pair):
            for tokens, loss in zip(*map(np.ndarray.tolist, run.series(LOSS)), strict=True):
                if np.isfinite(loss):
                    losses.setdefault(tokens, ({}, {}))[side][run.seeds] = loss
    gaps = {}
    for tokens in sorted(losses):
        gap = paired(*losses[tokens])
        if gap is not None and gap.seeds == len(pairs):
            gaps[tokens] = gap.estimate
    return gaps


def rows_of_gaps(rows: list[Row]) -> list[Row]:
    bases = [row.baseline for row in rows if row.gap]
    return [row for row in rows if row.gap or any(row is base for base in bases)]


def seed_noise(rows: list[Row]) -> Series | None:
    """Return half the width of the noise floor of loss gaps, as a curve over training tokens.

    The noise floor is an interval around 0. It contains 95% of the gaps between two variants whose
    expected losses are equal. It is computed from the rows with at least two seeds. Let s be the
    pooled standard deviation of the loss between seeds, n the smallest number of seeds per row, and
    t the 97.5% quantile of Student's t distribution with the degrees of freedom of s. Half the
    width is t s sqrt(2 / n). Return None if no row has two seeds.
    """
    curves = [[run.series(LOSS) for run in row.runs] for row in rows if len(row.runs) > 1]
    if not curves:
        return None
    from scipy.special import stdtrit

    x = reduce(np.intersect1d, [curve.tokens for row in curves for curve in row])
    losses = [np.stack([curve.values[np.isin(curve.tokens, x)] for curve in row]) for row in curves]
    variance, free = pooled_variance(losses)
    fewest = min(map(len, losses))
    half = stdtrit(free, (1 + CONFIDENCE) / 2) * np.sqrt(variance * 2 / fewest)
    known = np.isfinite(half)
    return Series(x[known], half[known]) if known.any() else None


class Budget(NamedTuple):
    unit: str
    meaning: str
    spent: Callable[[Run, Array], Array | None]
    """Returns the amounts spent (n,) after given numbers of tokens (n,); None if unknown."""
    facts: tuple[str, ...] = ()
    """Facts of run.json that must be equal to compare amounts."""


def seconds_spent(run: Run, tokens: Array) -> Array | None:
    """Return the training time in seconds after which a run had trained on `tokens` tokens.

    `tokens` and the result have shape (n,). The time of evaluations and checkpoints is excluded.
    Return None if the run did not log step times.
    """
    if "perf/step_ms" not in run.metrics.columns:
        return None
    places, step_ms = run.metrics.columns["perf/step_ms"]
    seconds = np.cumsum(np.diff(run.metrics.steps[places], prepend=0) * step_ms / 1e3)
    at = run.metrics.tokens[places]
    return np.interp(tokens, np.append(0, at), np.append(0, seconds), right=np.nan)


def flops_spent(run: Run, tokens: Array) -> Array | None:
    per_token, per_key = flops_facts(run.facts)
    if per_token is None:
        return None
    at, keys = keys_seen(run.metrics)
    if per_key is None or not len(at):
        return tokens * per_token
    # `per_token` counts the mean number of visible keys; the deviation so far is added.
    over_mean = np.append(0, keys - at * (keys[-1] / at[-1]))
    return tokens * per_token + per_key * np.interp(tokens, np.append(0, at), over_mean)


BUDGETS = {
    "tokens": Budget("tokens", "Tokens trained on", lambda run, tokens: tokens),
    "flops": Budget(
        "FLOPs", "Training FLOPs, forward and backward; attention counts visible keys only",
        flops_spent,
    ),
    "seconds": Budget(
        "seconds", "Time of training steps, without evaluations and saves", seconds_spent,
        machine_facts(),
    ),
}  # fmt: skip


def spent_curve(run: Run, budget: Budget) -> Series | None:
    tokens, losses = run.series(LOSS)
    known = np.isfinite(losses)
    spent = budget.spent(run, tokens[known])
    return None if spent is None else increasing(spent, losses[known])


def increasing(costs: Array, values: Array) -> Series | None:
    """Return the curve of the finite `values` (n,) over `costs` (n,), such as training FLOPs.

    First remove the values that are not finite, and their costs. Return None if no value is left,
    or if a remaining cost is not finite, not positive, or smaller than the previous cost.
    """
    known = np.isfinite(values)
    costs, values = costs[known], values[known]
    if not len(costs) or not np.isfinite(costs).all():
        return None
    return Series(costs, values) if costs[0] > 0 and (np.diff(costs) >= 0).all() else None


def last_common(curves: Iterable[Series]) -> float | None:
    """Return the largest x in the x ranges of all curves, or None if they have no common x."""
    curves = [*curves]
    at = float(min((curve.tokens[-1] for curve in curves), default=0))
    return at if curves and at >= max(curve.tokens[0] for curve in curves) else None


def equal_gap(row: Row, budget: Budget) -> EqualGap | None:
    """Return the loss gap of a row to its baseline at equal tokens, equal FLOPs or equal seconds.

    `budget` selects one of these three costs of training. The losses of all runs are compared at
    the largest cost for which all runs have a loss. Return None if no such cost exists, if the row
    has no gap, or if the cost of a run is unknown. Also return None if the cost is in seconds and
    the runs used different machines.
    """
    if row.gap is None or row.baseline is None:
        return None
    both = [*row.runs, *row.baseline.runs]
    if len({str([run.facts.get(fact) for fact in budget.facts]) for run in both}) > 1:
        return None
    curves = [(spent_curve(a, budget), spent_curve(b, budget)) for a, b in pairs_of_gap(row)]
    known = [(a, b) for a, b in curves if a is not None and b is not None]
    if not known or len(known) < len(curves):
        return None
    if (at := last_common(curve for pair in known for curve in pair)) is None:
        return None
    readings = [(read_curve(a, at), read_curve(b, at)) for a, b in known]
    gaps = [own - base for (own, _), (base, _) in readings]
    errors = [float(np.hypot(own, base)) for (_, own), (_, base) in readings]
    return EqualGap(estimate(gaps), at, float(np.mean(errors)))


def read_curve(curve: Series, at: float) -> tuple[float, float]:
    """Interpolate a loss curve at x = `at`, linearly in log x; return the loss and its error.

    The error is 0 if `at` is a point of the curve. Otherwise, estimate the error at the two points
    next to `at`: remove one point, interpolate its loss, and compare with its measured loss. The
    error is the larger difference. The first and last points of the curve cannot be removed; if
    both points next to `at` are such points, the error is infinite.
    """
    x, y = np.log(curve.tokens), curve.values
    place = int(np.searchsorted(x, np.log(at) * (1 - 1e-12)))
    if place < len(x) and np.isclose(x[place], np.log(at), rtol=1e-9, atol=0):
        return float(y[place]), 0.0
    inner = [i for i in (place - 1, place) if 0 < i < len(x) - 1]
    off = [abs(y[i] - np.interp(x[i], x[[i - 1, i + 1]], y[[i - 1, i + 1]])) for i in inner]
    return float(np.interp(np.log(at), x, y)), float(max(off, default=np.inf))
