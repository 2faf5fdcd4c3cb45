"""What the figures show: curves over tokens and over layers, the seeds of a row together."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from diffllm.report.comparison import Comparison, Row
from diffllm.report.runs import Run, Series

Array = np.ndarray
POINTS = 300
"""Most that a curve is drawn with."""
SMOOTHING = 50
"""The running mean of the training loss covers this part of the logged steps."""


@dataclass(frozen=True)
class Band:
    """A curve of a row: mean, lowest and highest over its seeds, each (n,)."""

    x: Array
    """Tokens, or layers."""
    mean: Array
    low: Array
    high: Array

    def since(self, x: float) -> "Band":
        """The part after `x`."""
        kept = self.x > x
        return Band(self.x[kept], self.mean[kept], self.low[kept], self.high[kept])


def finite(series: Series) -> Series:
    """Without NaN and infinities."""
    kept = np.isfinite(series.values)
    return Series(series.tokens[kept], series.values[kept])


def over_seeds(curves: Iterable[Series]) -> Band | None:
    """At every token count that some seed logged, over the seeds that got there; None if none."""
    curves = [curve for curve in map(finite, curves) if len(curve.tokens)]
    if not curves:
        return None
    grid = np.unique(np.concatenate([curve.tokens for curve in curves]))
    stack = np.stack([np.interp(grid, *curve, left=np.nan, right=np.nan) for curve in curves])
    reached = np.isfinite(stack).any(axis=0)
    grid, stack = grid[reached], stack[:, reached]
    return Band(grid, np.nanmean(stack, 0), np.nanmin(stack, 0), np.nanmax(stack, 0))


def band_of(row: Row, pick: Callable[[Run], Series]) -> Band | None:
    """One series of every run of a row."""
    return over_seeds(pick(run) for run in row.runs)


def smoothed(series: Series) -> Series:
    """The centred running mean over a fiftieth of the logged steps, at least 3 of 20 or more."""
    series = finite(series)
    n = len(series.values)
    half = max(n // SMOOTHING // 2, int(n >= 20))
    total = np.concatenate(([0.0], np.cumsum(series.values)))
    first, last = np.arange(n) - half, np.arange(n) + half + 1
    first, last = first.clip(0), last.clip(max=n)
    return Series(series.tokens, (total[last] - total[first]) / (last - first))


def largest(series: Series) -> Series:
    """Over layers: (n, L) to (n,)."""
    if not series.values.size:
        return Series(series.tokens[:0], np.zeros(0))
    values = np.where(np.isfinite(series.values), series.values, -np.inf)
    return Series(series.tokens, values.max(axis=1))


def at_end(row: Row, quantity: str) -> Band | None:
    """The last logged value of every layer."""
    ends = []
    for run in row.runs:
        values = run.by_layer(quantity).values
        if values.size:
            ends.append(Series(np.arange(values.shape[1]), values[-1]))
    return over_seeds(ends)


def thinned(band: Band) -> Band:
    """At most `POINTS` points: of every stretch the lowest and the highest."""
    n = len(band.x)
    if n <= POINTS:
        return band

    def extremes(low: Array, high: Array) -> Array:
        stretches = np.array_split(np.arange(n), POINTS // 2)
        pairs = ((s[low[s].argmin()], s[high[s].argmax()]) for s in stretches)
        return np.array([i for pair in pairs for i in sorted(pair)])

    line, edge = extremes(band.mean, band.mean), extremes(band.low, band.high)
    x = band.x[line]
    return Band(
        x,
        band.mean[line],
        np.interp(x, band.x[edge], band.low[edge]),
        np.interp(x, band.x[edge], band.high[edge]),
    )


def rises(row: Row, name: str) -> Array:
    """Tokens at which a count had risen since the logged step before, all seeds together."""
    tokens = []
    for run in row.runs:
        count = finite(run.series(name))
        tokens.append(count.tokens[np.diff(count.values, prepend=0) > 0])
    return np.concatenate(tokens) if tokens else np.zeros(0, np.int64)


def baseline_of(comparison: Comparison, row: Row) -> Row | None:
    """The baseline's row with the same other keys; None where a gap makes no sense."""
    if comparison.baseline is None or row.gap is None:
        return None

    def others(r: Row) -> dict[str, object]:
        return {key: value for key, value in r.keys.items() if key != "attention"}

    return next(
        (
            r
            for r in comparison.rows
            if r is not row
            and r.runs
            and r.runs[0].variant == comparison.baseline
            and others(r) == others(row)
        ),
        None,
    )


def gap_band(row: Row, baseline: Row) -> Band | None:
    """Held-out loss over the baseline's of the same seed, where both were evaluated."""
    of_seed = {run.cfg.seed: finite(run.series("eval/loss")) for run in baseline.runs}
    gaps = []
    for run in row.runs:
        if run.cfg.seed in of_seed:
            own, other = finite(run.series("eval/loss")), of_seed[run.cfg.seed]
            tokens, i, j = np.intersect1d(own.tokens, other.tokens, return_indices=True)
            gaps.append(Series(tokens, own.values[i] - other.values[j]))
    return over_seeds(gaps)


def over_time(row: Row, quantity: str, edges: Array) -> Array | None:
    """A quantity of every layer in bins of tokens, mean over a bin and over seeds.

    Args:
        edges: (n + 1,) tokens; a bin without a value takes the one before it.

    Returns:
        (L, n), NaN from the last logged step on; None if never logged.
    """
    maps = []
    for run in row.runs:
        tokens, values = run.by_layer(quantity)
        if not values.size:
            continue
        values = np.where(np.isfinite(values), values, np.nan)
        bins = (np.searchsorted(edges, tokens, side="left") - 1).clip(0, len(edges) - 2)
        grid = np.full((values.shape[1], len(edges) - 1), np.nan)
        filled = range(bins[-1] + 1)
        for b in filled:
            here = values[bins == b]
            here = here[np.isfinite(here).any(axis=1)]
            if len(here):
                counts = np.isfinite(here).sum(axis=0)
                grid[:, b] = np.nansum(here, axis=0) / np.where(counts, counts, np.nan)
            elif b:
                grid[:, b] = grid[:, b - 1]
        maps.append(grid)
    if not maps:
        return None
    stack = np.stack(maps)
    counts = np.isfinite(stack).sum(axis=0)
    return np.nansum(stack, axis=0) / np.where(counts, counts, np.nan)
