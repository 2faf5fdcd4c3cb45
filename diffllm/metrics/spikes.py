"""Count spikes of loss and gradient norm by three definitions; see docs/spikes.md.

Two published definitions compare a value with the mean of previous finite values. The third
definition removes the trend, and counts spikes that are close to each other as one event. It fits a
line to the values of n previous steps. The distance d of the value at step s from the line is:

    d = (value - line at s) / sqrt(1 + h),   h = 1 / n + (s - mean)^2 / sum((step - mean)^2)

The sum is over the n previous steps, and "mean" is the mean of their step numbers. If values vary
around a line with normal noise, d divided by the root mean square of the distances of m previous
steps follows Student's t distribution with m degrees of freedom. `as_normal` converts the quotient
to a standard normal deviate, so that a threshold of SIGMAS has the same rate of false alarms at all
steps. NaN and infinity are always spikes.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

WINDOW128_SIGMAS = 6.0


class Spike(NamedTuple):
    """A value that a definition counts as a spike."""

    height: float | None
    """Distance in the scale of the definition, in standard deviations; negative below the mean.

    None for NaN, infinity and the first increase of a constant series.
    """
    new: bool = True
    """False if the spike belongs to an earlier event, such as an earlier NaN without a pause."""


@dataclass
class SpikeCounter:
    """Count the spikes in a series of values, such as the losses of all steps.

    A spike is NaN, infinity, or a value far above the mean of previous finite values. If
    `two_sided` is True, a value far below this mean is also a spike.
    """

    window: int
    """Number of previous finite values in the mean and the standard deviation."""
    least: int
    """Number of finite values at the start of the series that are never spikes."""
    sigmas: float
    """Minimum distance of a spike from the mean, in population standard deviations."""
    two_sided: bool = False
    """Whether values below the mean can be spikes, too."""
    inclusive: bool = False
    """Whether a distance of exactly `sigmas` makes a value a spike."""

    def __post_init__(self) -> None:
        self.values: deque[float] = deque(maxlen=self.window)
        """The latest finite values."""
        self.recent: deque[bool] = deque(maxlen=self.window)
        """Whether each of the latest values, finite or not, is a spike."""
        self.total = 0
        self.seen = 0
        self.finite = True
        """Whether the newest value is finite."""

    def update(self, value: float) -> Spike | None:
        """Process the next value of the series; return the spike if the value is a spike.

        NaN and infinity after NaN or infinity are counted, but they are not new.
        """
        # A value is compared with previous values only, so it enters the window afterwards.
        spike = self._judge(value)
        is_spike = spike is not None
        self.seen += 1
        self.total += is_spike
        self.recent.append(is_spike)
        self.finite = math.isfinite(value)
        if self.finite:
            self.values.append(value)
        return spike

    def _judge(self, value: float) -> Spike | None:
        if not math.isfinite(value):
            return Spike(None, new=self.finite)
        if len(self.values) < self.least:
            return None
        window = np.fromiter(self.values, dtype=np.float64)
        difference = float(value - window.mean())
        deviation = abs(difference) if self.two_sided else difference
        scale = float(window.std())
        bound = self.sigmas * scale
        # In a constant window the bound is 0, and an equal value must not be a spike.
        is_at_bound = deviation == bound > 0
        if deviation > bound or (self.inclusive and is_at_bound):
            return Spike(difference / scale if scale else None)
        return None

    def metrics(self) -> dict[str, float]:
        """Return counts and shares of spikes by name.

        "total" is the number of spikes, and "score" is their share of all values. "rolling_total"
        and "rolling_score" cover only the last `window` values. "judged" is the number of values
        that could be spikes: all values except the first `least` finite values.
        """
        # `values` can hold `window` values, at least `least`. Its length is the number of unjudged
        # values until it contains `least`.
        unjudged = min(len(self.values), self.least)
        rolling = sum(self.recent)
        return {
            "total": float(self.total),
            "judged": float(self.seen - unjudged),
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
            "finite": int(self.finite),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = deque(state["values"], self.window)
        self.recent = deque(map(bool, state["recent"]), self.window)
        self.total = state["total"]
        self.seen = state["seen"]
        # Checkpoints of older versions lack this entry.
        self.finite = bool(state.get("finite", True))


def window128() -> SpikeCounter:
    return SpikeCounter(window=128, least=128, sigmas=WINDOW128_SIGMAS)


def olmo2() -> SpikeCounter:
    """Return a counter with the spike definition of OLMo 2 (arXiv 2501.00656, section 3)."""
    return SpikeCounter(window=1000, least=128, sigmas=7.0, two_sided=True, inclusive=True)


TREND = 32
"""Maximum number of values in the fit of the line."""
FIRST = 8
"""Minimum number of values in the fit of the line."""
SCALE = 256
"""Maximum number of distances from the line in the scale, their root mean square."""
LEAST = 16
"""Number of known distances before a value can be judged."""
SIGMAS = 4.0
"""Distance above the line that makes a spike, in normal deviations."""
APART = 8
"""Quiet steps between two events. More consecutive spikes or drops are a new level."""
FINEST = 1e-6
"""Smallest scale: the resolution of float32."""
COUNTS = ("seen", "judged", "total", "in_a_row", "last")


class EventCounter:
    """Count spike events in a series. Spikes at most APART steps apart are one event.

    A line is fitted to previous values that are neither spikes nor drops. A spike is more than
    SIGMAS deviations above the line, and a drop is more than SIGMAS deviations below the line. A
    deviation is the root mean square of previous distances from the line, corrected by `as_normal`.
    Spikes do not enter the root mean square, and each drop enters as a distance of SIGMAS
    deviations.

    Args:
        log: True for gradient norms: use logarithms of values, and ignore values of 0 or below.
    """

    def __init__(self, log: bool = False) -> None:
        self.log = log
        self.points: deque[tuple[int, float]] = deque(maxlen=TREND)
        """Steps and values in the fit of the line."""
        self.distances: deque[float] = deque(maxlen=SCALE)
        self.seen = 0
        """Number of values so far, and so the step of the newest value."""
        self.judged = 0
        self.total = 0
        """Number of events."""
        self.in_a_row = 0
        """Number of spikes and drops since the last other value, or since the fit was restarted."""
        self.last: int | None = None
        """Step of the last spike."""

    def update(self, value: float) -> Spike | None:
        """Process the next value of the series; return the spike if the value is a spike."""
        self.seen += 1
        if not math.isfinite(value):
            self.judged += 1
            self._exclude()
            return self._counted(None)
        if self.log:
            if value <= 0:
                return None
            value = math.log(value)
        distance = self._distance(value)
        if distance is not None and len(self.distances) >= LEAST:
            self.judged += 1
            degrees = len(self.distances)
            root_mean_square = math.hypot(*self.distances) / math.sqrt(degrees)
            scale = max(root_mean_square, FINEST)
            deviations = as_normal(distance / scale, degrees)
            if deviations < -SIGMAS:
                # Limit the effect of a drop on the scale.
                self.distances.append(-SIGMAS * scale)
            if abs(deviations) > SIGMAS:
                self._exclude()
                return self._counted(deviations) if deviations > 0 else None
        self.in_a_row = 0
        self.points.append((self.seen, value))
        if distance is not None:
            self.distances.append(distance)
        return None

    def _exclude(self) -> None:
        """Omit the current value, a spike or a drop, from the fit of the line.

        After more than APART omitted values in a row, the fit starts again without previous values.
        """
        self.in_a_row += 1
        if self.in_a_row > APART:
            self.points.clear()
            self.in_a_row = 0

    def _counted(self, height: float | None) -> Spike:
        """Count a spike at the current value.

        The first spike, and each spike more than APART steps after the previous spike, is counted
        as a new event.
        """
        is_new = self.last is None or self.seen - self.last > APART
        self.total += is_new
        self.last = self.seen
        return Spike(height, is_new)

    def _distance(self, value: float) -> float | None:
        """Return the distance d of `value` from the fitted line; the module docstring defines d.

        Return None if the line is fitted to fewer than FIRST values.
        """
        if len(self.points) < FIRST:
            return None
        # Omitted spikes and drops leave gaps, so the steps are not equally spaced.
        steps, values = np.array(self.points).T
        mean_step = steps.mean()
        centred_steps = steps - mean_step
        sum_of_squares = centred_steps @ centred_steps
        steps_ahead = self.seen - mean_step
        line = values.mean() + steps_ahead * (centred_steps @ values) / sum_of_squares
        # The factor 1 + h: the line is uncertain, and more so further from the mean step.
        variance_factor = 1 + 1 / len(steps) + steps_ahead**2 / sum_of_squares
        return float((value - line) / math.sqrt(variance_factor))

    def metrics(self) -> dict[str, float]:
        return {
            "total": float(self.total),
            "judged": float(self.judged),
            "score": self.total / max(1, self.judged),
        }

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: getattr(self, name) for name in COUNTS}
        state["points"] = list(self.points)
        state["distances"] = list(self.distances)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in COUNTS:
            setattr(self, name, state[name])
        # JSON turns tuples into lists.
        points = [(step, value) for step, value in state["points"]]
        self.points = deque(points, TREND)
        self.distances = deque(state["distances"], SCALE)


def as_normal(t: float, degrees: int) -> float:
    """Convert a value of Student's t to the standard normal deviate with the same tail probability.

    `degrees` is the number of degrees of freedom. The approximation is by D. L. Wallace (Annals of
    Mathematical Statistics 30, 1959).
    """
    # log1p keeps the digits of small values of t.
    magnitude = math.sqrt(degrees * math.log1p(t * t / degrees))
    correction = (8 * degrees + 1) / (8 * degrees + 3)
    return math.copysign(correction * magnitude, t)


SKIP_COUNTS = ("skipped_total", "skipped_in_a_row", "longest_skip")


class SpikeMonitor:
    """Count skipped updates, and spikes of loss and gradient norm by three definitions."""

    def __init__(self) -> None:
        self.skipped_total = 0
        self.skipped_in_a_row = 0
        self.longest_skip = 0
        """Largest number of consecutive skipped updates since the last `forget_skips`."""
        self.loss = window128()
        self.grad = window128()
        self.counters: dict[str, SpikeCounter | EventCounter] = {
            "spikes/loss": self.loss,
            "spikes/grad": self.grad,
            "spikes_olmo2/loss": olmo2(),
            "spikes_olmo2/grad": olmo2(),
            "spikes_detrended/loss": EventCounter(),
            "spikes_detrended/grad": EventCounter(log=True),
        }

    def update(self, loss: float, grad_norm: float, skipped: bool = False) -> dict[str, Spike]:
        """Process the next optimizer step; return the new spikes, by counter.

        `skipped` is True if the update of the step was skipped.
        """
        self.skipped_total += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.longest_skip = max(self.longest_skip, self.skipped_in_a_row)
        spikes = {}
        for name, counter in self.counters.items():
            value = loss if name.endswith("/loss") else grad_norm
            spike = counter.update(value)
            if spike and spike.new:
                spikes[name] = spike
        return spikes

    def forget_skips(self) -> None:
        self.skipped_in_a_row = 0
        self.longest_skip = 0

    def metrics(self) -> dict[str, float]:
        """Return all metrics by name, such as `spikes/loss_total` and `spikes/skipped_total`."""
        metrics = {}
        for name, counter in self.counters.items():
            for count, value in counter.metrics().items():
                metrics[f"{name}_{count}"] = value
        metrics["spikes/skipped_total"] = float(self.skipped_total)
        return metrics

    def windows(self) -> tuple[list[float], list[float]]:
        """Return the latest finite losses and gradient norms, at most 128 values each."""
        return list(self.loss.values), list(self.grad.values)

    def recent_loss(self, count: int) -> float:
        losses = list(self.loss.values)[-count:]
        return sum(losses) / len(losses) if losses else math.nan

    def state_dict(self) -> dict[str, Any]:
        state = {name: counter.state_dict() for name, counter in self.counters.items()}
        counts = {name: getattr(self, name) for name in SKIP_COUNTS}
        return {**state, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, counter in self.counters.items():
            counter.load_state_dict(state[name])
        for name in SKIP_COUNTS:
            setattr(self, name, state[name])
