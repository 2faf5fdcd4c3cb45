"""From device tensors of steps to lines in metrics.jsonl, wandb and the terminal.

Nothing is read from the device between logged steps: a step adds its tensors to a list, which is
read when a step is logged or saved, the scalars of all its steps in one copy.
"""

import contextlib
import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.build import Training
from diffllm.diagnostics import named_values
from diffllm.distributed.gradients import Norms
from diffllm.metrics.display import Display, measured
from diffllm.metrics.file import MetricsFile
from diffllm.metrics.mfu import mfu, peak_flops
from diffllm.metrics.table import metric_of
from diffllm.metrics.tensorboard import EventFiles
from diffllm.metrics.wandb_run import WandbRun
from diffllm.model.groups import group_of
from diffllm.model.stats import Stats
from diffllm.spikes import SpikeMonitor

T = TypeVar("T")


class StepResult(NamedTuple):
    """Device tensors of one optimizer step, equal on all ranks; nothing has waited for them."""

    nll: Tensor
    """Mean cross-entropy of the global batch, nats a token."""
    losses: dict[str, Tensor]
    """Other terms of the objective, weighted, by metric name: `train/z_loss` and so on."""
    skipped: Tensor
    """1.0 where the update was left out, else 0.0."""
    grad_norms: Norms
    """Gradient norms of every parameter, before clipping."""
    update_norm: Tensor | None
    """Norm of the change of all parameters, where it was asked for."""
    stats: Stats
    """Statistics that were due, over the global batch; each (L,) or (L, heads)."""
    target_share: Tensor | None = None
    """Share of the targets that were not ignored; None where none can be."""


class Outputs(NamedTuple):
    """The metrics file, wandb run and event files that rank 0 writes to."""

    file: MetricsFile
    wandb: WandbRun
    events: EventFiles | None = None

    def write(self, line: dict[str, Any]) -> None:
        """Write one step's values, `step` and `tokens` among them, to all."""
        self.file.write(line)
        self.wandb.log(line)
        if self.events:
            self.events.log(line)

    def close(self) -> None:
        self.file.close()
        if self.events:
            self.events.close()


class Recorder:
    """Collects on every rank, writes on rank 0; other ranks have no `outputs`."""

    def __init__(
        self, t: Training, spikes: SpikeMonitor, display: Display, outputs: Outputs | None
    ):
        self.device, self.steps = t.device, t.cfg.steps
        self.tokens_per_step = t.cfg.global_batch_size * t.cfg.seq_len
        self.flops_per_token, self.peak = t.model.flops_per_token(), peak_flops(t.device)
        self.spikes = spikes
        self.display, self.outputs = display, outputs
        self.pending: list[tuple[int, Tensor, Stats]] = []
        self.last: StepResult | None = None
        self.line: dict[str, Any] = {}
        self.speeds: list[float] = []

    def start(self, step: int) -> None:
        self.display.start(step)
        self.restart_clock(step)

    def restart_clock(self, step: int) -> None:
        self.logged_step = step
        self.data_s = self.paused_s = 0.0
        self.since = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count time as spent waiting for data, as `perf/data_ms`."""
        start = time.perf_counter()
        yield
        self.data_s += time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that does not count as training."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        yield
        self.paused_s += time.perf_counter() - start

    def add(self, step: int, out: StepResult) -> None:
        """Keep one step's device tensors."""
        row = torch.stack((out.nll, out.grad_norms.total, out.skipped))
        self.pending.append((step, row, out.stats))
        self.last = out
        self.display.advance(step)

    def note(self, name: str, value: float) -> None:
        self.line[name] = value

    def flush(self, step: int) -> None:
        """Read all pending steps: count spikes, write the lines that are due before `step`."""
        if not self.last or not self.pending:
            return
        values = torch.stack([row for _, row, _ in self.pending]).tolist()
        for (at, _, stats), (nll, norm, skipped) in zip(self.pending, values, strict=True):
            self.spikes.update(nll, norm, bool(skipped))
            if skipped:
                self.display.print(f"step {at}: update skipped, loss {nll:.4g}, grad {norm:.4g}")
            if at == step:
                self.line |= named_values(stats)
            elif stats:
                self.write(at, named_values(stats))
        nll, norm, _ = values[-1]
        self.latest = {"train/loss": nll, "train/grad_norm": norm}
        self.latest |= {name: loss.item() for name, loss in self.last.losses.items()}
        if self.last.target_share is not None:
            self.latest["train/target_share"] = self.last.target_share.item()
        self.pending.clear()

    def end_line(self, step: int) -> None:
        """Write what was noted or diagnosed at a step that is not logged otherwise."""
        self.flush(step)
        if self.line:
            if (said := measured(self.line)) and "train/lr" not in self.line:
                self.display.print(f"step {step}: {'  '.join(said)}")
            self.write(step, self.line)
            self.line = {}

    def log(self, step: int, lr: float, param_norm: Tensor, bits_a_nat: float | None) -> None:
        """Put training, performance and spikes into this step's line; all ranks call it.

        Args:
            bits_a_nat: bits a byte of text that a loss of 1 nat a token is; None if not known.
        """
        self.flush(step)
        count = step - self.logged_step
        elapsed = time.perf_counter() - self.since - self.paused_s
        speed = count * self.tokens_per_step / elapsed
        self.speeds.append(speed)
        assert self.last is not None
        assert self.last.update_norm is not None
        self.line |= {
            **self.latest,
            "train/lr": lr,
            "train/param_norm": param_norm.item(),
            "train/update_norm": self.last.update_norm.item(),
            **grad_norm_by_group(self.last.grad_norms),
            "perf/tokens_per_s": speed,
            "perf/step_ms": 1e3 * elapsed / count,
            "perf/data_ms": 1e3 * self.data_s / count,
            "perf/peak_memory_gib": peak_memory_gib(self.device),
            **self.spikes.metrics(),
        }
        if bits_a_nat is not None:
            self.line["train/bits_per_byte"] = bits_a_nat * self.latest["train/loss"]
        share = mfu(self.flops_per_token, speed / dist.get_world_size(), self.peak)
        if share is not None:
            self.line["perf/mfu"] = share
        self.display.show(step, self.line, (self.steps - step) * elapsed / count)
        self.restart_clock(step)

    def last_values(self) -> str:
        """Loss and gradient norm of the last step that was read."""
        loss, norm = self.latest["train/loss"], self.latest["train/grad_norm"]
        return f"the last at loss {loss:.4g}, gradient norm {norm:.4g}"

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line: step, tokens, values."""
        if self.outputs is not None:
            for name in values:
                metric_of(name)  # raises for a name that has no row
            line = {"step": step, "tokens": step * self.tokens_per_step, **values}
            self.outputs.write(line)


def grad_norm_by_group(norms: Norms) -> dict[str, float]:
    """`grad_norm/<group>` of the groups that there are."""
    squares: defaultdict[str, float] = defaultdict(float)
    for name, square in zip(norms.names, norms.squares.tolist(), strict=True):
        squares[group_of(name)] += square
    return {f"grad_norm/{group}": math.sqrt(square) for group, square in squares.items()}


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that this process has held: on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
