"""Spikes of loss and gradient norm: counted by two published definitions, and kept from updates.

The current value is never in its own window; finite values, spikes included, enter it afterwards;
NaN and infinity are always spikes and never enter it.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffllm.bounds import bounded
from diffllm.errors import AgreedByAll, AgreedError

WINDOW128_SIGMAS = 6.0
SKIPS = ("skipped_total", "skipped_in_a_row", "longest_skip")
"""The counts of skipped updates that a checkpoint holds."""


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

    def metrics(self) -> dict[str, float]:
        """Return the number of spikes and their share of the values, of all and of the last
        `window` values seen."""
        rolling = sum(self.recent)
        return {
            "total": float(self.total),
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


class SpikeMonitor:
    """Spike counts of loss and gradient norm by both definitions, and of skipped updates."""

    def __init__(self) -> None:
        self.skipped_total = self.skipped_in_a_row = 0
        self.longest_skip = 0
        """Most skipped updates in a row since `forget_skips`."""
        self.counters = {
            f"{prefix}/{series}": make()
            for prefix, make in (("spikes", window128), ("spikes_olmo2", olmo2))
            for series in ("loss", "grad")
        }

    def update(self, loss: float, grad_norm: float, skipped: bool = False) -> None:
        """Take one optimizer step's values, in order of steps."""
        self.skipped_total += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.longest_skip = max(self.longest_skip, self.skipped_in_a_row)
        for name, counter in self.counters.items():
            counter.update(loss if name.endswith("/loss") else grad_norm)

    def forget_skips(self) -> None:
        """Count skips in a row from here on."""
        self.skipped_in_a_row = self.longest_skip = 0

    def metrics(self) -> dict[str, float]:
        """Return `<definition>/{loss,grad}_[rolling_]{total,score}`, and `spikes/skipped_total`.

        Totals and scores are of the run so far; rolling ones of the definition's window.
        """
        counts = {
            f"{name}_{what}": value
            for name, counter in self.counters.items()
            for what, value in counter.metrics().items()
        }
        return {**counts, "spikes/skipped_total": float(self.skipped_total)}

    def recent_loss(self, count: int) -> float:
        """Return the mean of the last `count` finite losses."""
        losses = list(self.counters["spikes/loss"].values)[-count:]
        return sum(losses) / len(losses) if losses else math.nan

    def state_dict(self) -> dict[str, Any]:
        counters = {name: counter.state_dict() for name, counter in self.counters.items()}
        return {**counters, **{name: getattr(self, name) for name in SKIPS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, counter in self.counters.items():
            counter.load_state_dict(state[name])
        for name in SKIPS:
            setattr(self, name, state[name])


class SkipStep(Enum):
    """The updates that are left out.

    off: none. nonfinite: those of a loss or gradient norm that is not finite. spike: also those of
    a loss or gradient norm that is a spike by the window128 definition.
    """

    off = "off"
    nonfinite = "nonfinite"
    spike = "spike"


@dataclass
class ProtectionConfig:
    """The protection of parameters from bad updates."""

    skip_step: SkipStep = SkipStep.nonfinite
    """Updates that are left out: none, those with nan or infinity, or spikes as well."""
    max_consecutive_skips: int = bounded(20, least=1)
    """Skipped updates in a row after which a run saves and stops, at the next logged step."""


class SkippedTooOften(AgreedError, AgreedByAll):
    """Too many updates in a row were skipped; the run has been saved."""


class Guard:
    """A judge of each step's loss and gradient norm, on the device, without telling the host.

    Its windows are those of `SpikeMonitor`: each the last 128 finite values, in float64.
    """

    def __init__(self, mode: SkipStep, device: torch.device):
        self.mode = mode
        self.windows = torch.full(
            (2, window128().window), torch.nan, dtype=torch.float64, device=device
        )

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1.0 to skip the update, else 0.0 (float32); takes scalars equal on all ranks."""
        if self.mode is SkipStep.off:
            return torch.zeros((), device=loss.device)
        values = torch.stack((loss, grad_norm)).double()
        finite = values.isfinite()
        bad = ~finite
        if self.mode is SkipStep.spike:
            # NaN until a window is full: nothing is above it
            mean, std = self.windows.mean(1), self.windows.std(1, correction=0)
            bad = bad | (values - mean > WINDOW128_SIGMAS * std)
            moved = torch.cat((self.windows[:, 1:], values[:, None]), dim=1)
            self.windows = torch.where(finite[:, None], moved, self.windows)
        return bad.any().float()

    def load(self, monitor: SpikeMonitor) -> None:
        """Continue with the windows of a monitor that has seen the same steps."""
        rows = [list(monitor.counters[f"spikes/{series}"].values) for series in ("loss", "grad")]
        size = self.windows.shape[1]
        padded = [[float("nan")] * (size - len(row)) + row for row in rows]
        self.windows = torch.tensor(padded, dtype=torch.float64, device=self.windows.device)
