"""Bad updates, decided on and masked on the device at their own step."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from diffllm.errors import AgreedByAll, AgreedError, ConfigError
from diffllm.spikes import WINDOW128_SIGMAS, SpikeMonitor


class SkipStep(Enum):
    """Which updates are left out.

    off: none. nonfinite: those of a loss or gradient norm that is not finite. spike: also those of
    a loss or gradient norm that is a spike by the window128 definition.
    """

    off = "off"
    nonfinite = "nonfinite"
    spike = "spike"


@dataclass
class ProtectionConfig:
    """What keeps bad updates from the parameters."""

    skip_step: SkipStep = SkipStep.nonfinite
    max_consecutive_skips: int = 20
    """Skipped updates in a row after which a run saves and stops, at the next logged step."""

    def validate(self) -> None:
        """Raise ConfigError for a limit below 1."""
        if self.max_consecutive_skips < 1:
            raise ConfigError(
                f"train.max_consecutive_skips={self.max_consecutive_skips} must be at least 1"
            )


class SkippedTooOften(AgreedError, AgreedByAll):
    """Too many updates in a row were skipped; the run has been saved."""


class Guard:
    """Judges the loss and gradient norm of each step without telling the host.

    Its windows are those of `SpikeMonitor`: each the last 128 finite values, in float64.
    """

    def __init__(self, mode: SkipStep, device: torch.device):
        self.mode = mode
        window = SpikeMonitor().counters["spikes/loss"].window
        self.windows = torch.full((2, window), torch.nan, dtype=torch.float64, device=device)

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1.0 to skip the update, else 0.0: a float32 scalar, from scalars equal on all ranks."""
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
        rows: Iterable[list[float]] = (
            list(monitor.counters[f"spikes/{series}"].values) for series in ("loss", "grad")
        )
        size = self.windows.shape[1]
        padded = [[float("nan")] * (size - len(row)) + row for row in rows]
        self.windows = torch.tensor(padded, dtype=torch.float64, device=self.windows.device)
