"""Traces of a few steps by torch.profiler, for Perfetto or chrome://tracing."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from diffllm.core.errors import ConfigError
from diffllm.core.printing import to_stderr


@dataclass
class ProfileConfig:
    """Which steps are profiled."""

    steps: list[int] = field(default_factory=list)
    """First and last step to trace, as in [10,12], on every rank; empty: none."""

    def validate(self, steps: int) -> None:
        """Raise ConfigError for anything but two steps of the run, in order."""
        if self.steps and (len(self.steps) != 2 or not 1 <= self.steps[0] <= self.steps[1]):
            raise ConfigError(
                f"profile.steps={self.steps} must be a first and a last step, as [10,12] is"
            )
        if self.steps and self.steps[1] > steps:
            raise ConfigError(f"profile.steps={self.steps} goes beyond steps={steps}")


class StepProfiler:
    """Profiles the steps that the config names; the one before them is the profiler's warm-up.

    Args:
        directory: where each rank's trace goes, as rank<r>-steps-<first>-<last>.json.gz.
        say: tells a person where the trace is.
    """

    def __init__(self, cfg: ProfileConfig, directory: Path, rank: int, say: Callable[[str], None]):
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it reports its starts on stderr
        self.say = say
        self.first, self.last = cfg.steps or (0, -1)
        self.file = directory / f"rank{rank}-steps-{self.first}-{self.last}.json.gz"
        self.running: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context for the work of step `number`, counted from 1; named in the trace.

        A run that continues inside the range traces what is left of it.
        """
        if self.running is None and self.first - 1 <= number <= self.last:
            self._start(number)
        with record_function(f"step {number}") if self.running else nullcontext():
            yield
        if self.running:
            self.running.step()
            if number == self.last:
                self.close()

    def _start(self, number: int) -> None:
        warmup = int(number < self.first)
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self.running = profile(
            activities=activities,
            schedule=schedule(
                wait=0, warmup=warmup, active=self.last - number + 1 - warmup, repeat=1
            ),
            on_trace_ready=self._write,
            acc_events=True,  # else it warns of clearing them
        )
        self.running.start()

    def close(self) -> None:
        """End, and write what was traced so far."""
        if self.running:
            running, self.running = self.running, None
            running.stop()

    def _write(self, traced: profile) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if self.file.is_symlink():
                self.file.unlink()  # what it leads to is another's
            traced.export_chrome_trace(str(self.file))
        except (OSError, RuntimeError) as error:
            to_stderr(f"warning: {self.file} was not written: {error}")
        else:
            self.say(f"profile: {self.file}, for ui.perfetto.dev")
