"""Trends: whether the gap between two variants grows with tokens, parameters or positions.

A least-squares line over log2 of x is fitted to every run. All runs have the same x values, so the
slope of a gap is the difference of two slopes. Tests use the variance of slopes between seeds.
Correlated noise within one run therefore does not affect the coverage of confidence intervals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from diffllm.statistics.gap_tests import Gap, Seed, paired

FEWEST_POINTS = 3
LEADING_SHARE = 0.1
"""Share of training before which evaluations are ignored, because the steep first steps would
dominate the slope. It is a constant because a window chosen from data would bias the result."""


class Line(NamedTuple):
    slope: float
    """Slope per doubling of x."""
    start: float
    """Value of the line at the first x."""
    end: float
    """Value of the line at the last x."""


@dataclass(frozen=True)
class Trend:
    """Change of the gap between a variant and its baseline along x.

    `slope` is the change of the gap per doubling of x. `first` is the smallest x, and `start` is
    the fitted gap there. `last` is the largest x, and `end` is the fitted gap there. `points` is
    the number of x values.
    """

    slope: Gap
    start: float
    end: float
    points: int
    first: float
    last: float


def fit_line(x: np.ndarray, y: np.ndarray) -> Line:
    """Fit a line to y (n,) over log2 of x (n,) by least squares.

    Raises ValueError unless x has at least three different values, all above 0.
    """
    has_enough_points = len(np.unique(x)) >= FEWEST_POINTS
    if not has_enough_points or not (x > 0).all():
        raise ValueError(f"a trend needs at least {FEWEST_POINTS} different x, all above 0")
    doublings = np.log2(x)
    centred = doublings - doublings.mean()
    slope = float(centred @ y / (centred @ centred))
    # The line passes through the mean of the points.
    mean_x = doublings.mean()
    mean_y = y.mean()
    start = float(mean_y + slope * (doublings[0] - mean_x))
    end = float(mean_y + slope * (doublings[-1] - mean_x))
    return Line(slope, start, end)


Curve = tuple[np.ndarray, np.ndarray]
"""Increasing x values (n,), such as tokens, and y values (n,)."""


def gap_trend(candidate: Mapping[Seed, Curve], base: Mapping[Seed, Curve]) -> Trend | None:
    """Return the trend of the gap, `candidate` minus `base`, over log2 of x after LEADING_SHARE.

    Only the common seeds are used, at the x values of all their curves. Return None if these curves
    share fewer than FEWEST_POINTS x values. With a single seed, the slope has no confidence
    interval.

    Args:
        candidate, base: curve of each run by seed.
    """
    seeds = sorted(candidate.keys() & base.keys())  # type: ignore[type-var]
    curves = [candidate[seed] for seed in seeds]
    curves += [base[seed] for seed in seeds]
    x, ys = common_points(curves, LEADING_SHARE)
    if len(x) < FEWEST_POINTS:
        return None
    candidate_slopes = {}
    base_slopes = {}
    start_gaps = []
    end_gaps = []
    candidate_ys = ys[: len(seeds)]
    base_ys = ys[len(seeds) :]
    for seed, y, base_y in zip(seeds, candidate_ys, base_ys, strict=True):
        line = fit_line(x, y)
        base_line = fit_line(x, base_y)
        candidate_slopes[seed] = line.slope
        base_slopes[seed] = base_line.slope
        start_gaps.append(line.start - base_line.start)
        end_gaps.append(line.end - base_line.end)
    slope = paired(candidate_slopes, base_slopes)
    assert slope is not None  # Without common seeds there are no common x values.
    start = float(np.mean(start_gaps))
    end = float(np.mean(end_gaps))
    return Trend(slope, start, end, len(x), float(x[0]), float(x[-1]))


def common_points(
    curves: Sequence[tuple[np.ndarray, np.ndarray]], window: float = 0.0
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return (x, ys): the x values (n,) common to all curves, and each curve's y values (n,) there.

    Points whose y is not finite are ignored.

    Args:
        curves: arrays (x, y) of each curve.
        window: points with x below `window` times the largest common x are ignored.
    """
    if not curves:
        return np.zeros(0), []
    finite_curves = []
    for x, y in curves:
        is_finite = np.isfinite(y)
        finite_curves.append((x[is_finite], y[is_finite]))
    common = finite_curves[0][0]
    for x, _ in finite_curves[1:]:
        common = np.intersect1d(common, x)
    if len(common):
        common = common[common >= window * common[-1]]
    ys = []
    for x, y in finite_curves:
        _, places, _ = np.intersect1d(x, common, return_indices=True)
        ys.append(y[places])
    return common, ys
