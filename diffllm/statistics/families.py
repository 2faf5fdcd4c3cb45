"""Several comparisons at once: Holm's correction."""

from collections.abc import Sequence

import numpy as np

ALPHA = 0.05
"""Share of families without any true difference in which one may be shown by chance."""


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p of a family of tests, in their order (Holm, 1979).

    The smallest of m is multiplied by m, the next by m - 1, and so on, none becomes smaller than
    one before it, or larger than 1. Those below alpha are shown; if no true difference is among
    them, one or more are so with probability alpha at most, however the tests depend on each other.
    """
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    steps = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return adjusted.tolist()
