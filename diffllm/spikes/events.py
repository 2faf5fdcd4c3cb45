"""Spikes as events: on what is left of a series once its trend is taken away.

A window's standard deviation holds the descent itself, so definitions over raw values miss spikes
while a run still learns. Here a value is compared with the line through the values before it:

    d = (value - line) / sqrt(1 + h),   h = 1 / n + (t - mean step)^2 / sum (step - mean step)^2

For independent normal values around a line, d has their standard deviation, however few the n steps
that the line is fitted to, and d over the root mean square of m earlier ones is Student's t with m
degrees of freedom. `as_normal` turns it into the deviation of a normal law that is as rare, so that
one bound gives one rate of false alarms from the first judged step to the last.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

TREND = 32
"""Values that the line is fitted to, at most."""
FIRST = 8
"""Values that it is fitted to at least."""
SCALE = 256
"""Distances from the line whose root mean square is the scale, at most."""
LEAST = 16
"""Distances that must be known before a value can be judged."""
SIGMAS = 4.0
"""Normal deviations above the line that make a spike: one value of noise in some 30,000."""
APART = 8
"""Steps without a spike after which the next one is another event; of spikes, or drops, without a
break, more than so many are a new level."""
FINEST = 1e-6
"""Nats, or relative change of a norm, that float32 does not resolve: no scale is smaller."""
COUNTS = ("seen", "judged", "total", "in_a_row", "last")
"""The numbers that a checkpoint holds beside the points and distances."""


@dataclass
class EventCounter:
    """Counts the events of one series: spikes that follow each other closely are one.

    The line is fitted by least squares to the last values that were neither spikes nor as far below
    it. Spikes are not in the scale, and such drops as if they were at the bound, so that it follows
    noise that grows. NaN and infinity are always spikes.

    Args:
        log: whether the logarithm of the values is taken, for gradient norms; values that have
            none are left out.
    """

    log: bool = False

    def __post_init__(self) -> None:
        self.points: deque[tuple[int, float]] = deque(maxlen=TREND)
        """Step and value of those that the line is fitted to."""
        self.distances: deque[float] = deque(maxlen=SCALE)
        self.seen = self.judged = self.total = self.in_a_row = 0
        self.last: int | None = None
        """The step of the last spike."""

    def update(self, value: float) -> bool:
        """Take the next value of the series; True when it is a spike."""
        self.seen += 1
        if not math.isfinite(value):
            self.judged += 1
            self._leave_out()
            self._count()
            return True
        if self.log:
            if value <= 0:
                return False
            value = math.log(value)
        distance = self._distance(value)
        if distance is not None and len(self.distances) >= LEAST:
            self.judged += 1
            scale = self._scale()
            deviations = as_normal(distance / scale, len(self.distances))
            if deviations > SIGMAS:
                self._leave_out()
                self._count()
                return True
            if deviations < -SIGMAS:  # no drop moves the line, or the scale by much
                self._leave_out()
                self.distances.append(-SIGMAS * scale)
                return False
        self.in_a_row = 0
        self.points.append((self.seen, value))
        if distance is not None:
            self.distances.append(distance)
        return False

    def _count(self) -> None:
        """Note a spike at this step: an event, unless it belongs to the one before."""
        self.total += self.last is None or self.seen - self.last > APART
        self.last = self.seen

    def _leave_out(self) -> None:
        """Keep a value from the line; after too many in a row the line begins anew."""
        self.in_a_row += 1
        if self.in_a_row > APART:
            self.points.clear()
            self.in_a_row = 0

    def _distance(self, value: float) -> float | None:
        """Return d for a value at this step; None before there is a line."""
        if len(self.points) < FIRST:
            return None
        steps, values = np.array(self.points).T
        middle = steps.mean()
        centred = steps - middle
        squares, ahead = centred @ centred, self.seen - middle
        line = values.mean() + ahead * (centred @ values) / squares
        return float((value - line) / math.sqrt(1 + 1 / len(steps) + ahead**2 / squares))

    def _scale(self) -> float:
        """Return the root mean square of the known distances."""
        return max(math.hypot(*self.distances) / math.sqrt(len(self.distances)), FINEST)

    def metrics(self) -> dict[str, float]:
        """Return the number of events, of steps that could be judged, and events over these."""
        return {
            "total": float(self.total),
            "judged": float(self.judged),
            "score": self.total / max(1, self.judged),
        }

    def state_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in COUNTS}
        return {**counts, "points": list(self.points), "distances": list(self.distances)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in COUNTS:
            setattr(self, name, state[name])
        self.points = deque(((step, value) for step, value in state["points"]), TREND)
        self.distances = deque(state["distances"], SCALE)


def as_normal(t: float, degrees: int) -> float:
    """Return the normal deviation that is as rare as Student's t of so many degrees of freedom.

    By the approximation of D. L. Wallace (Annals of Mathematical Statistics 30, 1959).
    """
    size = math.sqrt(degrees * math.log1p(t * t / degrees))
    return math.copysign((8 * degrees + 1) / (8 * degrees + 3) * size, t)
