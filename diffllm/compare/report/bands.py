"""The curves of figures: over tokens and over layers, the seeds of a row together."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from diffllm.compare.report.rows import Row
from diffllm.compare.report.runs import Run, Series
from diffllm.statistics.estimates import CONFIDENCE
from diffllm.statistics.seed_variance import pooled_variance

Array = np.ndarray
POINTS = 300
"""Most that a curve is drawn with."""


@dataclass(frozen=True)
class Band:
    """A curve of a row: mean, lowest and highest over its seeds, each (n,).

    NaN where a seed has no value: a mean over those that are left is of other seeds.
    """

    x: Array
    """Tokens, or layers."""
    mean: Array
    low: Array
    high: Array
    singles: list[Array]
    """The single seeds, (n,) each, where not all have a value; NaN elsewhere."""
    stops: list[tuple[float, float]]
    """The last point of a seed that ends before another, or is not finite from there on."""

    @property
    def drawn(self) -> Array:
        """All finite values that a figure of it shows."""
        values = np.concatenate([self.low, self.high, *self.singles])
        return values[np.isfinite(values)]

    def at(self, kept: Array) -> "Band":
        """The curve at some of its places, (n,) bool."""
        singles = [y[kept] for y in self.singles]
        return Band(
            self.x[kept], self.mean[kept], self.low[kept], self.high[kept], singles, self.stops
        )


def over_seeds(curves: Iterable[Series]) -> Band | None:
    """On every x of some seed, between a seed's own points interpolated; None if all are empty."""
    curves = [curve for curve in curves if len(curve.tokens)]
    if not any(np.isfinite(curve.values).any() for curve in curves):
        return None
    x = np.unique(np.concatenate([curve.tokens for curve in curves]))
    seeds = np.stack([np.interp(x, *curve, left=np.nan, right=np.nan) for curve in curves])
    alone = np.isnan(seeds).any(axis=0)
    beside = np.convolve(alone, [1, 1, 1])[1:-1] > 0
    singles = [y for y in np.where(beside, seeds, np.nan) if np.isfinite(y).any()]
    last = [np.flatnonzero(np.isfinite(y))[-1:] for y in seeds]
    stops = [(x[i], y[i]) for y, at in zip(seeds, last, strict=True) for i in at if i < len(x) - 1]
    together = np.where(alone, np.nan, seeds)
    mean, low, high = together.mean(axis=0), together.min(axis=0), together.max(axis=0)
    return Band(x, mean, low, high, singles, stops)


def band_of(row: Row, pick: Callable[[Run], Series]) -> Band | None:
    return over_seeds(pick(run) for run in row.runs)


def window(points: int) -> int:
    """Width of a running mean: a fiftieth of a long run, about a tenth of a short one; odd."""
    return 2 * max(points // 100, min(points // 20, 5)) + 1


def smoothed(series: Series, points: int) -> Series:
    """The centred running mean over that many logged steps, fewer at the ends."""
    finite = np.isfinite(series.values)
    n, half = len(finite), points // 2
    total = np.concatenate(([0.0], np.cumsum(np.where(finite, series.values, 0))))
    count = np.concatenate(([0], np.cumsum(finite)))
    first, last = (np.arange(n) - half).clip(0), (np.arange(n) + half + 1).clip(max=n)
    means = (total[last] - total[first]) / (count[last] - count[first]).clip(1)
    return Series(series.tokens, np.where(finite, means, np.nan))


def shown_at_end(row: Row) -> list[Run]:
    return [run for run in row.runs if run.summary is not None] or row.runs


def at_end(row: Row, quantity: str) -> Band | None:
    """A quantity over layers, at the last logged step that the shown runs have in common."""
    logged = [(run.layers(quantity), run.by_layer(quantity)) for run in shown_at_end(row)]
    logged = [(layers, series) for layers, series in logged if series.values.size]
    if not logged:
        return None
    common = reduce(np.intersect1d, [series.tokens for _, series in logged])
    if not len(common):
        return None
    return over_seeds(
        Series(np.array(layers), series.values[series.tokens == common[-1]][-1])
        for layers, series in logged
    )


def thinned(values: Array) -> Array:
    """Indices of at most `POINTS` values: lowest, highest and the first NaN of every stretch."""
    if len(values) <= POINTS:
        return np.arange(len(values))
    kept: set[int] = set()
    for stretch in np.array_split(np.arange(len(values)), POINTS // 3):
        missing = np.isnan(values[stretch])
        known = stretch[~missing]
        kept.update(stretch[missing][:1])
        if len(known):
            kept |= {known[values[known].argmin()], known[values[known].argmax()]}
    return np.array(sorted(kept))


def envelope(band: Band) -> tuple[Array, Array, Array]:
    """x, low and high at no more than `POINTS` places: the lowest and highest up to the next."""
    n = len(band.x)
    starts = np.linspace(0, n, min(n, POINTS), endpoint=False).astype(int)
    low, high = np.fmin.reduceat(band.low, starts), np.fmax.reduceat(band.high, starts)
    return band.x[starts], low, high


def rises(row: Row, name: str) -> Array:
    """Tokens at which a count had risen since the logged step before, all seeds together."""
    tokens = [np.zeros(0, np.int64)]
    for run in row.runs:
        count = run.series(name)
        known = np.isfinite(count.values)
        tokens.append(count.tokens[known][np.diff(count.values[known], prepend=0) > 0])
    return np.concatenate(tokens)


def gap_band(row: Row) -> Band | None:
    """Held-out loss over that of the baseline's run with the same seeds, where both were evaluated.

    None for a row that has no gap.
    """
    if row.baseline is None:
        return None
    of_seeds = {run.seeds: run.series("eval/loss") for run in row.baseline.runs}
    gaps = []
    for run in row.runs:
        if run.seeds in of_seeds:
            own, other = run.series("eval/loss"), of_seeds[run.seeds]
            tokens, i, j = np.intersect1d(own.tokens, other.tokens, return_indices=True)
            gaps.append(Series(tokens, own.values[i] - other.values[j]))
    return over_seeds(gaps)


def rows_of_gaps(rows: list[Row]) -> list[Row]:
    """Those that have a gap, and those that these are measured from."""
    bases = [row.baseline for row in rows if row.gap]
    return [row for row in rows if row.gap or any(row is base for base in bases)]


@dataclass(frozen=True)
class Floor:
    """The noise floor of a gap, by tokens: half the width of a band around zero, each (n,)."""

    x: Array
    half: Array


def seed_noise(rows: list[Row]) -> Floor | None:
    """The gap that two rows of the same expectation would stay within, 95% of the time.

    At every evaluation that all have in common, t s sqrt(2 / n): s is the deviation between seeds,
    pooled over rows, n the seeds of the row that has fewest, and t Student's, of as many degrees of
    freedom as s has. None where no row has two seeds.
    """
    curves = [[run.series("eval/loss") for run in row.runs] for row in rows if len(row.runs) > 1]
    if not curves:
        return None
    from scipy.special import stdtrit

    x = reduce(np.intersect1d, [curve.tokens for row in curves for curve in row])
    losses = [np.stack([curve.values[np.isin(curve.tokens, x)] for curve in row]) for row in curves]
    variance, free = pooled_variance(losses)
    fewest = min(map(len, losses))
    half = stdtrit(free, (1 + CONFIDENCE) / 2) * np.sqrt(variance * 2 / fewest)
    known = np.isfinite(half)
    return Floor(x[known], half[known]) if known.any() else None


def over_time(row: Row, quantity: str, edges: Array) -> Array | None:
    """A quantity of every layer in stretches of tokens, as last logged; mean over `shown_at_end`.

    Args:
        edges: (n + 1,) tokens.

    Returns:
        (L, n), NaN where a run has no value, or has ended; None if never logged.
    """
    maps = []
    for run in shown_at_end(row):
        tokens, values = run.by_layer(quantity)
        if len(tokens):
            at = np.searchsorted(tokens, edges[1:], side="right") - 1
            maps.append(np.where((at >= 0) & (edges[:-1] < tokens[-1]), values[at].T, np.nan))
    return np.stack(maps).mean(axis=0) if maps else None
