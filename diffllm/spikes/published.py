"""The two published definitions of a spike, over raw values of a series.

The current value is never in its own window; finite values, spikes included, enter it afterwards;
NaN and infinity are always spikes and never enter it.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

WINDOW128_SIGMAS = 6.0


@dataclass
class SpikeCounter:
    """Counts spikes of one series.

    Args:
        window: how many earlier values count.
        least: how many must be there before a finite value can be a spike.
        sigmas: population standard deviations from the window's mean that make a spike.
        two_sided: whether drops count too.
        inclusive: whether exactly `sigmas` counts.
    """

    window: int
    least: int
    sigmas: float
    two_sided: bool = False
    inclusive: bool = False

    def __post_init__(self) -> None:
        self.values: deque[float] = deque(maxlen=self.window)
        self.recent: deque[bool] = deque(maxlen=self.window)
        self.total = self.seen = 0

    def update(self, value: float) -> bool:
        """Take the next value of the series; True when it is a spike."""
        spike = self._is_spike(value)
        self.seen += 1
        self.total += spike
        self.recent.append(spike)
        if math.isfinite(value):
            self.values.append(value)
        return spike

    def _is_spike(self, value: float) -> bool:
        if not math.isfinite(value):
            return True
        if len(self.values) < self.least:
            return False
        window = np.fromiter(self.values, dtype=np.float64)
        deviation = value - window.mean()
        if self.two_sided:
            deviation = abs(deviation)
        bound = self.sigmas * window.std()
        return bool(deviation > bound or (self.inclusive and deviation == bound > 0))

    @property
    def judged(self) -> int:
        """How many values could be spikes: all but the first finite ones."""
        return self.seen - min(len(self.values), self.least)

    def metrics(self) -> dict[str, float]:
        """Return the number of spikes and their share of the values, of all and of the last
        `window` values seen; and how many values could be judged.

        The published scores divide by all values, those that could not be judged among them.
        """
        rolling = sum(self.recent)
        return {
            "total": float(self.total),
            "judged": float(self.judged),
            "score": self.total / max(1, self.seen),
            "rolling_total": float(rolling),
            "rolling_score": rolling / max(1, len(self.recent)),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": list(self.values),
            "recent": [int(spike) for spike in self.recent],
            "total": self.total,
            "seen": self.seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = deque(state["values"], self.window)
        self.recent = deque(map(bool, state["recent"]), self.window)
        self.total, self.seen = state["total"], state["seen"]


def window128() -> SpikeCounter:
    """Count values above mean + 6 standard deviations of the 128 before them, once there are
    128."""
    return SpikeCounter(window=128, least=128, sigmas=WINDOW128_SIGMAS)


def olmo2() -> SpikeCounter:
    """Count values 7 or more standard deviations from the mean of the last 1,000, from 128 on.

    OLMo 2 (arXiv 2501.00656), section 3.
    """
    return SpikeCounter(window=1000, least=128, sigmas=7.0, two_sided=True, inclusive=True)
