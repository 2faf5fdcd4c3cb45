"""Write the results of training steps to the metric sinks and the terminal.

`Record.add` stores the result tensors of each step. `Record.write` copies loss, gradient norm and
skip flag of all stored steps to the host at once. The training loop calls `Record.write` only at
logged, evaluated and saved steps, because a copy makes the host wait for the device.
"""

import math
import resource
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.core.gpus import DEVICES
from diffllm.data.loader import TrainLoader
from diffllm.distributed.gradients import Norms, parameter_norm
from diffllm.metrics.diagnostics import Stats, named_values
from diffllm.metrics.display import Display, evaluation_texts
from diffllm.metrics.events import BatchPlace, Event, events_of_step, short_hash
from diffllm.metrics.sinks import Sinks
from diffllm.metrics.steps import STEP_DTYPE
from diffllm.model.attention.masks import moved
from diffllm.model.stats import group_of
from diffllm.training.build import Training
from diffllm.training.clock import Clock
from diffllm.training.state import LoopState
from diffllm.training.step import StepResult


class Pending(NamedTuple):
    """A step whose results are still on the device."""

    step: int
    learning_rate: float
    results: Tensor
    """Loss, gradient norm and skip flag, (3,) float32."""
    stats: Stats


class Costs(NamedTuple):
    """Costs of a run up to a step."""

    training_flops: float
    train_seconds: float
    wall_seconds: float


class Record:
    """Collects results of training steps on every rank, and writes metrics on rank 0.

    The training speed is a mean over the steps since the previous logged step.
    """

    def __init__(
        self, t: Training, state: LoopState, clock: Clock, display: Display, sinks: Sinks | None
    ):
        self.t = t
        self.state = state
        self.clock = clock
        self.display = display
        self.sinks = sinks
        self.spikes = state.spikes
        self.visible_keys = state.visible_keys
        self.peak = peak_flops(t.device)
        self.flops_per_token = t.model.flops_per_token()
        self.active_parameters = t.model.active_parameters()
        self.keys_of_steps: list[Tensor] = []
        self.pending: list[Pending] = []
        if state.training_flops is None:
            # A float: state.json cannot contain integers beyond 64 bits.
            state.training_flops = float(state.tokens * self._flops_per_token_before())
        self.costs = self._costs()
        self.last: StepResult | None = None
        self.latest: dict[str, float] = {}
        self.speeds: list[float] = []
        self._begin_interval(state.step, 0.0)

    def _begin_interval(self, step: int, waited_s: float) -> None:
        self.logged_step = step
        self.waited_s = waited_s
        self.since = self.clock.train_seconds

    def add(self, step: int, result: StepResult) -> None:
        results = torch.stack((result.nll, result.grad_norms.total, result.skipped))
        self.pending.append(Pending(step, self.learning_rate, results, result.stats))
        if result.visible_keys is not None:
            self.keys_of_steps.append(result.visible_keys)
        self.last = result
        self.display.advance(step)

    @property
    def learning_rate(self) -> float:
        return float(self.t.optimizer.param_groups[0]["lr"])

    def write(self, step: int, values: dict[str, float], loader: TrainLoader, log: bool) -> None:
        """Write metrics and events of all steps since the previous call. Every rank must call this.

        Args:
            step: the newest step for which `add` was called.
            values: additional metrics of `step`, by name.
            loader: the training loader, whose position is the end of `step`.
            log: whether `step` must be logged.
        """
        pending = self.pending
        self.pending = []
        # One copy for all steps: each copy makes the host wait for the device.
        stacked = torch.stack([p.results for p in pending])  # (steps, 3)
        results = stacked.tolist()
        events = self._process(pending, results, loader)
        statistics: dict[int, dict[str, float]] = {}
        if self.sinks:  # Other ranks need not copy them to the host.
            for p in pending:
                if p.stats:
                    statistics[p.step] = named_values(p.stats)
        line = {**values, **statistics.get(step, {})}
        if log:
            line |= self._logged(step, loader)
        former_costs = self.costs
        self.costs = self._costs()
        if self.sinks:
            for event in events:
                self.sinks.write_event(event)
            rows = self._rows(pending, results, former_costs)
            self.sinks.write(rows, {**statistics, step: line})
        if log:
            remaining_s = (self.t.cfg.steps - step) * line["perf/step_ms"] / 1e3
            self.display.show(step, line, remaining_s)
            self._begin_interval(step, loader.waited_s)
            return
        texts = evaluation_texts(line)
        if texts:
            self.display.print(f"step {step}: {'  '.join(texts)}")

    def _process(
        self, pending: list[Pending], results: list[list[float]], loader: TrainLoader
    ) -> list[Event]:
        """Count spikes, visible keys and FLOPs of `pending`; copy more results to the host.

        Return the events of these steps.
        """
        events = []
        for p, (nll, norm, skipped) in zip(pending, results, strict=True):
            spikes = self.spikes.update(nll, norm, bool(skipped))
            if spikes or skipped:
                batch = self._batch(loader, pending[-1].step - p.step)
                tokens = self._tokens(p.step)
                event = Event("skipped", p.step, tokens, value=nll, lr=p.learning_rate, batch=batch)
                events += events_of_step(event, bool(skipped), spikes, norm)
            if skipped:
                text = f"step {p.step}: update skipped, loss {nll:.4g}, grad {norm:.4g}"
                self.display.print(text)
        assert self.last is not None
        nll, norm, _ = results[-1]
        self.latest = {"train/loss": nll, "train/grad_norm": norm}
        for name, loss in self.last.losses.items():
            self.latest[name] = loss.item()
        if self.last.target_share is not None:
            self.latest["train/target_share"] = self.last.target_share.item()
        tokens = len(pending) * self.t.tokens
        flops_per_token = self.flops_per_token
        if self.keys_of_steps:
            # Each rank counts its queries; all ranks call `write` at the same steps.
            keys_of_rank = torch.stack(self.keys_of_steps).sum()
            keys = moved(keys_of_rank, self.t.device)
            dist.all_reduce(keys)
            visible_keys = int(keys.item())
            self.visible_keys.add(visible_keys, tokens)
            flops_per_token = self.t.model.flops_per_token(visible_keys / tokens)
        self.keys_of_steps.clear()
        assert self.state.training_flops is not None
        self.state.training_flops += tokens * flops_per_token
        return events

    def _batch(self, loader: TrainLoader, steps_ago: int) -> BatchPlace:
        """Return the samples of the step that ended `steps_ago` steps before the newest step."""
        size = self.t.cfg.global_batch_size
        order = self.state.order
        stop = loader.sample - steps_ago * size
        places = loader.samples.places(range(stop - size, stop))
        samples = {place.source: [place.first, place.stop] for place in places}
        return BatchPlace(
            tokens_hash=short_hash(order["tokens"]),
            seed=order["seed"],
            stage=self.state.stage,
            seq_len=order["seq_len"],
            packing=order["data.packing"],
            samples=samples,
        )

    def _flops_per_token_before(self) -> float:
        """Estimate the FLOPs per token up to a checkpoint of a version that did not store FLOPs."""
        visible_keys = self.visible_keys.mean
        if visible_keys is None:
            visible_keys = self.t.cfg.visible_keys
        return self.t.model.flops_per_token(visible_keys)

    def _tokens(self, step: int) -> int:
        """Return the training tokens up to `step`, a step of this start."""
        steps_ago = self.state.step - step
        return self.state.tokens - steps_ago * self.t.tokens

    def _costs(self) -> Costs:
        assert self.state.training_flops is not None
        return Costs(self.state.training_flops, self.clock.train_seconds, self.clock.wall_seconds)

    def _rows(
        self, pending: list[Pending], results: list[list[float]], former_costs: Costs
    ) -> np.ndarray:
        """Return the rows of steps.npy of the steps `pending`, (n,) of dtype STEP_DTYPE.

        Costs are interpolated between `former_costs`, the costs up to the step that precedes
        `pending`, and the costs up to the last step of `pending`.
        """
        count = len(pending)
        rows = np.zeros(count, STEP_DTYPE)
        rows["step"] = [p.step for p in pending]
        rows["tokens"] = [self._tokens(p.step) for p in pending]
        rows["tokens_per_parameter"] = rows["tokens"] / self.active_parameters
        for name, first, last in zip(Costs._fields, former_costs, self.costs, strict=True):
            costs = np.linspace(first, last, count + 1)
            # The first cost belongs to the step that precedes `pending`.
            rows[name] = costs[1:]
        rows["train/lr"] = [p.learning_rate for p in pending]
        losses, grad_norms, skip_flags = np.array(results).T
        rows["train/loss"] = losses
        rows["train/grad_norm"] = grad_norms
        rows["train/skipped"] = skip_flags
        return rows

    def _logged(self, step: int, loader: TrainLoader) -> dict[str, float]:
        t = self.t
        consumed = loader.samples.consumed(loader.sample)
        bits_per_nat = loader.samples.bits_per_nat(loader.sample)
        param_norm = parameter_norm(t.params, t.meshes.dense)
        assert self.last is not None
        assert self.last.update_norm is not None
        if t.device.type == "cuda":
            peak_memory = torch.cuda.max_memory_allocated(t.device) / 2**30
        else:  # Linux reports KiB.
            peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        steps = step - self.logged_step
        elapsed = self.clock.train_seconds - self.since
        waited_s = loader.waited_s - self.waited_s
        speed = steps * self.t.tokens / elapsed
        self.speeds.append(speed)
        line = {
            **consumed,
            **self.latest,
            "train/lr": self.learning_rate,
            "train/param_norm": param_norm.item(),
            "train/update_norm": self.last.update_norm.item(),
            **grad_norm_by_group(self.last.grad_norms),
            "perf/tokens_per_s": speed,
            "perf/step_ms": 1e3 * elapsed / steps,
            "perf/data_ms": 1e3 * waited_s / steps,
            "perf/peak_memory_gib": peak_memory,
            **self.spikes.metrics(),
        }
        if bits_per_nat is not None:
            line["train/bits_per_byte"] = bits_per_nat * self.latest["train/loss"]
        flops_per_token = self.flops_per_token
        if t.documents:
            visible_keys = self.visible_keys.log()
            line["data/visible_keys"] = visible_keys
            flops_per_token = t.model.flops_per_token(visible_keys)
        if self.peak:
            flops_of_gpu = flops_per_token * speed / dist.get_world_size()
            line["perf/mfu"] = flops_of_gpu / self.peak
        return line


def grad_norm_by_group(norms: Norms) -> dict[str, float]:
    """Return each parameter group's gradient L2 norm, by a name such as "grad_norm/attention"."""
    squares: defaultdict[str, float] = defaultdict(float)
    # One copy for all norms: each copy makes the host wait for the device.
    for name, square in zip(norms.names, norms.squares.tolist(), strict=True):
        squares[group_of(name)] += square
    return {f"grad_norm/{group}": math.sqrt(square) for group, square in squares.items()}


def peak_flops(device: torch.device) -> float | None:
    """Return the data sheet's dense bf16 FLOP/s of a GPU in DEVICES; None for other devices.

    Model FLOPs utilisation (MFU) is the model's training FLOPs per second, divided by this peak
    (PaLM, arXiv 2204.02311, appendix B). The FLOPs of the forward and backward matrix products are
    counted. Attention counts as causal, and recomputation is not counted.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known_device in DEVICES:
        if known_device.name in name:
            return known_device.peak_flops
    return None
