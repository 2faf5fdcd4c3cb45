"""The updates that a spike, NaN or infinity keeps from the parameters."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from diffllm.bounds import bounded
from diffllm.spikes.monitor import SpikeMonitor
from diffllm.spikes.published import WINDOW128_SIGMAS, window128


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
    """Skipped updates in a row after which a run has diverged: it saves and ends."""


class SkippedTooOften(Exception):
    """So many updates in a row were skipped that the run has diverged; it is saved, and the
    argument says how many. Every rank raises it at the same step."""


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
