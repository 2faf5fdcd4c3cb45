"""Speed of training steps: traces by torch.profiler, and peak FLOP/s for MFU.

Model FLOPs utilisation (MFU) is the model's training FLOPs per second, divided by the device's
dense bf16 peak (PaLM, arXiv 2204.02311, appendix B). The FLOPs of the forward and backward matrix
products are counted. Attention counts as causal, and recomputation is not counted.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import profile, record_function, schedule

from diffllm.core.errors import ConfigError
from diffllm.core.keys import key
from diffllm.core.printing import to_stderr
from diffllm.metrics.devices import DEVICES


@dataclass
class ProfileConfig:
    """Range of training steps to profile."""

    steps: list[int] = key(
        [],
        effect="speed",
        help="First and last step to trace, such as [10,12], on every rank; empty: no trace.",
    )

    def validate(self, steps: int) -> None:
        if self.steps and not (
            len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1] <= steps
        ):
            raise ConfigError(
                f"profile.steps={self.steps} must be [first,last] with "
                f"1 <= first <= last <= {steps}, the last training step"
            )


class StepProfiler:
    """Writes a torch.profiler trace of the configured steps to a file in `directory`.

    The step before the first traced step is the profiler's warm-up. `say` is a function that prints
    a message. It is called with a message that contains the file's path, after the file is written.
    """

    def __init__(self, cfg: ProfileConfig, directory: Path, rank: int, say: Callable[[str], None]):
        # Without this variable, the profiler prints messages on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self.say = say
        self.first, self.last = cfg.steps or (0, -1)
        self.file = directory / f"rank{rank}-steps-{self.first}-{self.last}.json.gz"
        self.running: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context manager of training step `number` (from 1).

        The code in this context is traced if the step is in the configured range.
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
        self.running = profile(
            schedule=schedule(
                wait=0, warmup=warmup, active=self.last - number + 1 - warmup, repeat=1
            ),
            on_trace_ready=self._write,
            acc_events=True,  # otherwise torch warns that events are cleared
        )
        self.running.start()

    def close(self) -> None:
        if self.running:
            # Cleared first: if `stop` raises, `close` must not stop the profiler again.
            running, self.running = self.running, None
            running.stop()

    def _write(self, traced: profile) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # Otherwise the trace would overwrite the target of the link.
            if self.file.is_symlink():
                self.file.unlink()
            traced.export_chrome_trace(str(self.file))
        except (OSError, RuntimeError) as error:
            to_stderr(f"warning: cannot write {self.file}, training continues: {error}")
        else:
            self.say(f"profile: {self.file} (open with ui.perfetto.dev)")


def peak_flops(device: torch.device) -> float | None:
    """Return the data sheet's dense bf16 FLOP/s of a GPU in DEVICES; None for other devices."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known_device in DEVICES:
        if known_device.name in name:
            return known_device.peak_flops
    return None
