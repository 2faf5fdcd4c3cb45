"""The curves of figures: over tokens and over layers, the seeds of a row together."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from diffllm.report.rows import Row
from diffllm.report.runs import Run, Series

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
    singles: list[Series] = field(default_factory=list)
    """The single seeds where not all have a value, NaN elsewhere."""
    stops: Array = field(default_factory=lambda: np.zeros((0, 2)))
    """(m, 2): the last value of a seed that ends before another, or is not finite from there on."""

    def since(self, x: float) -> "Band":
        """The part after `x`."""
        kept = self.x > x
        singles = [Series(s.tokens[s.tokens > x], s.values[s.tokens > x]) for s in self.singles]
        return Band(
            self.x[kept],
            self.mean[kept],
            self.low[kept],
            self.high[kept],
            [s for s in singles if len(s.tokens)],
            self.stops[self.stops[:, 0] > x],
        )

    @property
    def drawn(self) -> Array:
        """All finite values that a figure of it shows."""
        values = np.concatenate([self.low, self.high, *(s.values for s in self.singles)])
        return values[np.isfinite(values)]


def masked(series: Series) -> Series:
    """The series with NaN for infinity."""
    return Series(series.tokens, np.where(np.isfinite(series.values), series.values, np.nan))


def over_seeds(curves: Iterable[Series]) -> Band | None:
    """On every x of some seed, between a seed's own points interpolated; None if all are empty."""
    curves = [masked(curve) for curve in curves if len(curve.tokens)]
    if not any(np.isfinite(curve.values).any() for curve in curves):
        return None
    x = np.unique(np.concatenate([curve.tokens for curve in curves]))
    stack = np.stack([np.interp(x, *curve, left=np.nan, right=np.nan) for curve in curves])
    alone = ~np.isfinite(stack).all(axis=0)
    beside = alone.copy()
    beside[1:] |= alone[:-1]
    beside[:-1] |= alone[1:]
    singles = [Series(x, np.where(beside, seed, np.nan)) for seed in stack] if alone.any() else []
    stops = []
    for seed in stack:
        reached = np.flatnonzero(np.isfinite(seed))
        if len(reached) and reached[-1] < len(x) - 1:
            stops.append((x[reached[-1]], seed[reached[-1]]))
    return Band(
        x,
        np.where(alone, np.nan, stack.mean(axis=0)),
        np.where(alone, np.nan, stack.min(axis=0)),
        np.where(alone, np.nan, stack.max(axis=0)),
        [single for single in singles if np.isfinite(single.values).any()],
        np.array(stops, dtype=float).reshape(-1, 2),
    )


def band_of(row: Row, pick: Callable[[Run], Series]) -> Band | None:
    """One series of every run of a row."""
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


def largest(series: Series) -> Series:
    """The largest over layers: (n, L) to (n,); NaN where one is not finite."""
    if not series.values.size:
        return Series(series.tokens[:0], np.zeros(0))
    return Series(series.tokens, masked(series).values.max(axis=1))


def shown_at_end(row: Row) -> list[Run]:
    """The finished runs; all of a row that has none."""
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


def thinned(band: Band) -> Band:
    """At most `POINTS` points: the mean's extremes of every stretch, within the band's.

    Where values are missing a point without one stays.
    """
    singles = [Series(s.tokens[kept], s.values[kept])
               for s in band.singles for kept in [extremes(s.values)]]  # fmt: skip
    kept = extremes(band.mean)
    if len(kept) == len(band.x):
        return Band(band.x, band.mean, band.low, band.high, singles, band.stops)
    low, high = band.low.copy(), band.high.copy()
    for stretch in stretches(band.mean):
        there = stretch[np.isfinite(band.mean[stretch])]
        if len(there):
            low[there], high[there] = band.low[there].min(), band.high[there].max()
    return Band(band.x[kept], band.mean[kept], low[kept], high[kept], singles, band.stops)


def stretches(values: Array) -> list[Array]:
    """Indices, so that three or two of each make up at most `POINTS`."""
    each = 3 if np.isnan(values).any() else 2
    return np.array_split(np.arange(len(values)), POINTS // each)


def extremes(values: Array) -> Array:
    """Indices of at most `POINTS` values: lowest, highest and the first NaN of every stretch."""
    if len(values) <= POINTS:
        return np.arange(len(values))
    kept = set()
    for stretch in stretches(values):
        missing = np.isnan(values[stretch])
        if missing.any():
            kept.add(stretch[missing.argmax()])
        if not missing.all():
            kept |= {stretch[np.nanargmin(values[stretch])], stretch[np.nanargmax(values[stretch])]}
    return np.array(sorted(kept))


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


def over_time(row: Row, quantity: str, edges: Array) -> Array | None:
    """A quantity of every layer in bins of tokens, mean over a bin and over `shown_at_end`.

    Args:
        edges: (n + 1,) tokens; a bin without a logged step takes the one before it.

    Returns:
        (L, n), NaN where a run has no finite value; None if never logged.
    """
    maps = []
    for run in shown_at_end(row):
        tokens, values = masked(run.by_layer(quantity))
        if not values.size:
            continue
        bins = (np.searchsorted(edges, tokens, side="left") - 1).clip(0, len(edges) - 2)
        grid = np.full((values.shape[1], len(edges) - 1), np.nan)
        for b in range(bins[-1] + 1):
            here = values[bins == b]
            if len(here):
                grid[:, b] = here.mean(axis=0)
            elif b:
                grid[:, b] = grid[:, b - 1]
        maps.append(grid)
    return np.stack(maps).mean(axis=0) if maps else None
