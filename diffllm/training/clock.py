"""Training time of a run over all its starts."""

import contextlib
import time
from collections.abc import Iterator

import torch


class Clock:
    """Measures seconds since the first start of a run, without the time between two starts.

    Args:
        device: the device that trains.
        wall_seconds: time until the checkpoint from which the run resumes; 0 for a new run.
        train_seconds: the part of this time outside of `paused`.
    """

    def __init__(self, device: torch.device, wall_seconds: float, train_seconds: float):
        self.device = device
        self.start = time.perf_counter() - wall_seconds
        self.paused_seconds = wall_seconds - train_seconds

    @property
    def wall_seconds(self) -> float:
        return time.perf_counter() - self.start

    @property
    def train_seconds(self) -> float:
        return self.wall_seconds - self.paused_seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside this context, such as that of an evaluation."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        yield
        self.paused_seconds += time.perf_counter() - start
