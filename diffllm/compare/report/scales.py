"""Scales of axes in figures: ends of axes, and logarithmic axes."""

from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np

from diffllm.compare.arms.sentences import short
from diffllm.compare.report.curves import Band
from diffllm.core.run_files import LARGEST
from diffllm.statistics.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW = 24
"""Curves of at most this number of points have markers."""
OUTLYING = 8
"""The scale of gaps ends at this multiple of the (lower) median reach of an interval."""
FIRST_STEPS = 0.2
"""Share of a run that counts as first steps, whose high losses would flatten the scale of the rest.
Curves of few points have no first steps."""


def value_range(bands: list[Band]) -> tuple[float, float]:
    """Return the least and the largest finite value of bands."""
    values = np.concatenate([band.drawn for band in bands])
    return float(values.min()), float(values.max())


def top_of(bands: list[Band]) -> float:
    """Return the upper end of a linear loss axis, or infinity if there is no finite loss.

    The axis ignores the first 20% of training and marked spikes, and includes all other losses.
    """
    last_x = max(band.x[-1] for band in bands)
    tops = []
    for band in bands:
        # Where the band has a gap, single seeds are drawn.
        values = np.fmax.reduce([band.high, *band.singles])
        start = 0.0
        if len(band.x) > FEW:
            start = FIRST_STEPS * last_x
        is_late = band.x >= start
        is_included = np.isfinite(values) & is_late
        for spike in band.spikes:
            first, last = np.searchsorted(band.x, (spike.x, spike.end))
            is_included[first : last + 1] = False
        if is_included.any():
            tops.append(float(values[is_included].max()))
    if not tops:
        return np.inf
    low, _ = value_range(bands)
    highest = max(tops)
    # A margin below the edge, so that the highest curve does not touch it.
    return highest + 0.08 * (highest - low)


def scale_limits(gaps: list[Estimate]) -> tuple[float, float]:
    """Return the lower and upper end of an axis for the mean gaps and their intervals.

    The axis contains 0, but no values beyond a limit. The limit is OUTLYING times the median size
    of the gaps with the most seeds; the size of a gap is the largest absolute value of its mean and
    its interval ends. The intervals of gaps with fewer seeds are ignored, because they are wider.
    """
    most_seeds = max(gap.seeds for gap in gaps)
    values: list[float] = []
    sizes = []
    for gap in gaps:
        if gap.seeds == most_seeds:
            ends = [gap.mean]
            if gap.interval:
                ends += gap.interval
            values += ends
            sizes.append(max(map(abs, ends)))
    limit = OUTLYING * median_low(sizes)
    # All gaps can be 0; an axis needs some length.
    if limit == 0:
        limit = 1.0
    values = np.clip(values, -limit, limit).tolist()
    for gap in gaps:
        if abs(gap.mean) <= limit:
            values.append(gap.mean)
    low = min(0.0, *values)
    high = max(0.0, *values)
    margin = 0.12 * (high - low)
    if margin == 0:
        margin = 1.0
    return low - margin, high + margin


def hide_nonpositive(values: np.ndarray, log: bool) -> np.ndarray:
    """Return values (n,) with NaN in place of those that a logarithmic axis cannot show."""
    if not log:
        return values
    # Smaller positive values occur only in damaged files; the axis would get infinite limits.
    return np.where(values > 1 / LARGEST, values, np.nan)


def logarithmic(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # A short scale contains few powers of ten, or none, and needs ticks between them.
    subs: tuple[float, ...] = (1,)
    if high < 4 * low:
        subs = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    elif high < 100 * low:
        subs = (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda y, _: short(y, 4))
