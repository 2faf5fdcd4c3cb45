"""Write the results of training steps to metrics.jsonl, wandb and the terminal.

`Record.add` stores the result tensors of each step. `Record.write` copies loss, gradient norm and
skip flag of all stored steps to the host at once. The training loop calls `Record.write` only at
logged, evaluated and saved steps, because a copy makes the host wait for the device.
"""

import contextlib
import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.data.loader import TrainLoader
from diffllm.distributed.gradients import Norms, parameter_norm
from diffllm.metrics.diagnostics import Stats, named_values
from diffllm.metrics.display import Display, evaluation_texts
from diffllm.metrics.profiling import peak_flops
from diffllm.metrics.sinks import Sinks
from diffllm.model.attention.ops import moved
from diffllm.model.stats import group_of
from diffllm.training.build import Training
from diffllm.training.state import LoopState
from diffllm.training.step import StepResult


class Record:
    """Collects results of training steps on every rank, and writes metrics on rank 0.

    The training speed is a mean over the steps since the previous logged step.
    """

    def __init__(self, t: Training, state: LoopState, display: Display, sinks: Sinks | None):
        self.t, self.flops_per_token, self.peak = t, t.model.flops_per_token(), peak_flops(t.device)
        self.spikes, self.display, self.sinks = state.spikes, display, sinks
        self.visible_keys = state.visible_keys
        self.keys_of_steps: list[Tensor] = []
        self.pending: list[tuple[int, Tensor, Stats]] = []
        self.last: StepResult | None = None
        self.latest: dict[str, float] = {}
        self.speeds: list[float] = []
        self._begin_interval(state.step, 0.0)

    def _begin_interval(self, step: int, waited_s: float) -> None:
        self.logged_step, self.waited_s, self.paused_s = step, waited_s, 0.0
        self.since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside this context from the measured training speed."""
        if self.t.device.type == "cuda":
            torch.cuda.synchronize(self.t.device)
        start = time.perf_counter()
        yield
        self.paused_s += time.perf_counter() - start

    def add(self, step: int, result: StepResult) -> None:
        row = torch.stack((result.nll, result.grad_norms.total, result.skipped))
        self.pending.append((step, row, result.stats))
        if result.visible_keys is not None:
            self.keys_of_steps.append(result.visible_keys)
        self.last = result
        self.display.advance(step)

    def write(self, step: int, values: dict[str, float], loader: TrainLoader | None) -> None:
        """Write metrics of all steps since the previous call. Every rank must call this.

        Args:
            step: the newest step for which `add` was called.
            values: additional metrics of `step`, by name.
            loader: the training loader if `step` must be logged, else None.
        """
        line = {**values, **self._copy_to_host(step)}
        if loader:
            line |= self._logged(step, loader)
        if line and self.sinks:
            self.sinks.write(step, step * self.t.tokens, line)
        if loader:
            self.display.show(step, line, (self.t.cfg.steps - step) * line["perf/step_ms"] / 1e3)
            self._begin_interval(step, loader.waited_s)
        elif said := evaluation_texts(line):
            self.display.print(f"step {step}: {'  '.join(said)}")

    def _copy_to_host(self, step: int) -> dict[str, float]:
        """Copy to the host the results of all steps since the previous call of this method.

        Return the model statistics of `step` by name. Write the statistics of earlier steps to the
        metric sinks.
        """
        if not self.last or not self.pending:
            return {}
        found: dict[str, float] = {}
        values = torch.stack([row for _, row, _ in self.pending]).tolist()
        for (at, _, stats), (nll, norm, skipped) in zip(self.pending, values, strict=True):
            self.spikes.update(nll, norm, bool(skipped))
            if skipped:
                self.display.print(f"step {at}: update skipped, loss {nll:.4g}, grad {norm:.4g}")
            if at == step:
                found = named_values(stats)
            elif stats and self.sinks:
                self.sinks.write(at, at * self.t.tokens, named_values(stats))
        nll, norm, _ = values[-1]
        self.latest = {"train/loss": nll, "train/grad_norm": norm}
        self.latest |= {name: loss.item() for name, loss in self.last.losses.items()}
        if self.last.target_share is not None:
            self.latest["train/target_share"] = self.last.target_share.item()
        if self.keys_of_steps:
            keys = moved(torch.stack(self.keys_of_steps).sum(), self.t.device)
            dist.all_reduce(keys)
            self.visible_keys.add(int(keys.item()), len(self.keys_of_steps) * self.t.tokens)
        self.keys_of_steps.clear()
        self.pending.clear()
        return found

    def _logged(self, step: int, loader: TrainLoader) -> dict[str, float]:
        t, read = self.t, loader.samples.consumed(loader.sample)
        bits_per_nat = loader.samples.bits_per_nat(loader.sample)
        param_norm = parameter_norm(t.params, t.meshes.dense)
        assert self.last is not None
        assert self.last.update_norm is not None
        if t.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(t.device) / 2**30
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        count = step - self.logged_step
        elapsed = time.perf_counter() - self.since - self.paused_s
        speed = count * self.t.tokens / elapsed
        self.speeds.append(speed)
        line = {
            **read,
            **self.latest,
            "train/lr": t.optimizer.param_groups[0]["lr"],
            "train/param_norm": param_norm.item(),
            "train/update_norm": self.last.update_norm.item(),
            **grad_norm_by_group(self.last.grad_norms),
            "perf/tokens_per_s": speed,
            "perf/step_ms": 1e3 * elapsed / count,
            "perf/data_ms": 1e3 * (loader.waited_s - self.waited_s) / count,
            "perf/peak_memory_gib": peak,
            **self.spikes.metrics(),
        }
        if bits_per_nat is not None:
            line["train/bits_per_byte"] = bits_per_nat * self.latest["train/loss"]
        flops_per_token = self.flops_per_token
        if t.documents:
            line["data/visible_keys"] = visible_keys = self.visible_keys.log()
            flops_per_token = t.model.flops_per_token(visible_keys)
        if self.peak:
            line["perf/mfu"] = flops_per_token * speed / dist.get_world_size() / self.peak
        return line


def grad_norm_by_group(norms: Norms) -> dict[str, float]:
    """Return each parameter group's gradient L2 norm, by a name such as "grad_norm/attention"."""
    squares: defaultdict[str, float] = defaultdict(float)
    for name, square in zip(norms.names, norms.squares.tolist(), strict=True):
        squares[group_of(name)] += square
    return {f"grad_norm/{group}": math.sqrt(square) for group, square in squares.items()}
