"""From device tensors of steps to lines in metrics.jsonl, wandb and the terminal.

Nothing is read from the device between logged steps: a step adds its tensors to a list, and the
list goes through one collective and one copy when it is logged or saved.
"""

import contextlib
import resource
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.diagnostics import named_values
from diffllm.display import Display
from diffllm.metrics import MetricsFile, WandbRun
from diffllm.mfu import mfu, peak_flops
from diffllm.model.stats import Stats
from diffllm.spikes import SpikeMonitor

T = TypeVar("T")


class Outputs(NamedTuple):
    """Where rank 0 writes."""

    file: MetricsFile
    wandb: WandbRun


class Recorder:
    """Collects on every rank, writes on rank 0.

    Args:
        steps: of the whole run.
        tokens_per_step: of the global batch.
        flops_per_token: training FLOPs, for MFU.
        z_weight: of the z-loss; `train/z_loss` is left out at 0.
        outputs: None on ranks other than 0.
    """

    def __init__(
        self,
        device: torch.device,
        steps: int,
        tokens_per_step: int,
        flops_per_token: float,
        z_weight: float,
        spikes: SpikeMonitor,
        display: Display,
        outputs: Outputs | None,
    ):
        self.device, self.steps, self.tokens_per_step = device, steps, tokens_per_step
        self.flops_per_token, self.peak = flops_per_token, peak_flops(device)
        self.z_weight, self.spikes = z_weight, spikes
        self.display, self.outputs = display, outputs
        self.pending: list[tuple[int, Tensor, Stats]] = []
        self.line: dict[str, Any] = {}
        self.speeds: list[float] = []

    def start(self, step: int) -> None:
        """Begin after `step` steps."""
        self.display.start(step)
        self.restart_clock(step)

    def restart_clock(self, step: int) -> None:
        """Begin a new interval of the performance numbers."""
        self.logged_step = step
        self.data_s = self.paused_s = 0.0
        self.since = time.perf_counter()

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; the time spent waiting for them counts as `perf/data_ms`."""
        while True:
            start = time.perf_counter()
            batch = next(batches)
            self.data_s += time.perf_counter() - start
            yield batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that does not count as training."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        yield
        self.paused_s += time.perf_counter() - start

    def add(self, step: int, nll: Tensor, z: Tensor, grad_norm: Tensor, stats: Stats) -> None:
        """Keep one step's device scalars: this rank's share of nll and z, the global norm."""
        self.pending.append((step, torch.stack((nll, z, grad_norm)), stats))
        self.display.advance(step)

    def note(self, name: str, value: float) -> None:
        """Have a value written in the line of the current step."""
        self.line[name] = value

    def flush(self, step: int) -> None:
        """Read all pending steps: count spikes, write the lines that are due before `step`."""
        if not self.pending:
            return
        rows = torch.stack([row for _, row, _ in self.pending])
        shared = rows[:, :2].contiguous()
        dist.all_reduce(shared)
        values = torch.cat((shared, rows[:, 2:]), dim=1).tolist()
        for (at, _, stats), (nll, _, norm) in zip(self.pending, values, strict=True):
            self.spikes.update(nll, norm)
            if at == step:
                self.line |= named_values(stats)
            elif stats:
                self.write(at, named_values(stats))
        nll, z, norm = values[-1]
        self.latest = {"train/loss": nll, "train/grad_norm": norm}
        if self.z_weight:
            self.latest["train/z_loss"] = self.z_weight * z
        self.pending.clear()

    def end_line(self, step: int) -> None:
        """Write what was noted or diagnosed at a step that is not logged otherwise."""
        self.flush(step)
        if self.line:
            self.write(step, self.line)
            self.line = {}

    def log(self, step: int, lr: float, param_norm: Tensor) -> None:
        """Put training, performance and spikes into this step's line; all ranks call it."""
        self.flush(step)
        count = step - self.logged_step
        elapsed = time.perf_counter() - self.since - self.paused_s
        speed = count * self.tokens_per_step / elapsed
        self.speeds.append(speed)
        self.line |= {
            **self.latest,
            "train/lr": lr,
            "train/param_norm": param_norm.item(),
            "perf/tokens_per_s": speed,
            "perf/step_ms": 1e3 * elapsed / count,
            "perf/data_ms": 1e3 * self.data_s / count,
            "perf/peak_memory_gib": peak_memory_gib(self.device),
            **self.spikes.metrics(),
        }
        share = mfu(self.flops_per_token, speed / dist.get_world_size(), self.peak)
        if share is not None:
            self.line["perf/mfu"] = share
        self.display.show(step, self.line, (self.steps - step) * elapsed / count)
        self.restart_clock(step)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line: step, tokens, values."""
        if self.outputs is not None:
            line = {"step": step, "tokens": step * self.tokens_per_step, **values}
            self.outputs.file.write(line)
            self.outputs.wandb.log(line)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that this process has held: on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
