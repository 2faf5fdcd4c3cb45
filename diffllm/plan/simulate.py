"""Simulation, on a CPU, of one training step of one rank of a cluster.

The simulation runs the training code. Tensors have shapes but no data, and collectives do nothing.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from diffllm.config import Precision, TrainConfig
from diffllm.distributed.experts import balanced_splits
from diffllm.distributed.gradients import local
from diffllm.model.attention.ops import Backend
from diffllm.model.loss import loss_chunk
from diffllm.model.transformer import TrainOutput
from diffllm.plan.compiled import compiling, gpu_kernels
from diffllm.plan.memory import Observer
from diffllm.plan.step import Call, Kind, Step
from diffllm.training.build import Training, allocated, sharded_model
from diffllm.training.step import Due, train_step

CPU = torch.device("cpu")
SIMULATED = 2
"""Maximum number of simulated micro-batches: all but the last are alike, so 2 are enough."""
EVERYTHING = Due(statistics=True, probes=True, update=True)


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """In this context, this process is rank `rank` of `size` ranks, and collectives do nothing."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # remove the hook that prefixes tracebacks with a rank


def as_on_gpu(cfg: TrainConfig) -> TrainConfig:
    """Return `cfg` with automatic settings, such as precision=auto, resolved as on a GPU.

    The simulation runs on a CPU, so replace the attention backends flash and flex by sdpa.
    """
    model, cuda = cfg.model, torch.device("cuda")
    attention = model.attention.resolve(model, cuda).device_config
    if attention.backend in (Backend.flash, Backend.flex):
        attention = replace(attention, backend=Backend.sdpa)
    chunk = loss_chunk(model.loss_chunk, cuda, model.vocab_size, model.dim).value
    model = replace(model, attention=attention, loss_chunk=chunk)
    precision = cfg.precision
    if precision is Precision.auto:
        precision = Precision.bf16
    # compile=null means true on a GPU.
    is_compiled = cfg.compile is not False
    return replace(cfg, model=model, precision=precision, compile=is_compiled)


def simulate(cfg: TrainConfig, world_size: int, rank: int = 0) -> Step:
    """Simulate one training step on `world_size` ranks; return memory and collectives of `rank`.

    Raises ConfigError if `world_size` ranks cannot run `cfg`.
    """
    cfg.check_world(world_size)
    micro, count = cfg.micro_batches(world_size)
    # The ranks of a context group share the sequences of a micro-batch.
    groups = world_size // cfg.parallel.context
    n_simulated = min(count, SIMULATED)
    cfg = replace(as_on_gpu(cfg), global_batch_size=micro * groups * n_simulated)
    if cfg.parallel.context > 1:
        # Probes gather all keys, but only in few steps.
        diagnostics = replace(cfg.diagnostics, probe_interval=0)
        cfg = replace(cfg, diagnostics=diagnostics)
    observer = Observer()
    gc.collect()
    with fake_world(rank, world_size), compiling(), gpu_kernels():
        sharded = sharded_model(cfg, CPU, balanced_splits)
        with FakeTensorMode(allow_non_fake_inputs=True), observer.memory.patched(), observer:
            training = allocated(cfg, CPU, sharded)
            measured = MeasuredTraining(training, observer)
            return measured.step(count)


class MeasuredTraining:
    """Wrapper of the Training `t` that measures the memory and the collectives of training steps.

    The context manager `observer` must be active while `t` is built and during the steps.
    """

    def __init__(self, t: Training, observer: Observer):
        self.t = t
        self.memory = observer.memory
        self.calls = observer.calls
        self.parts: list[tuple[int, int, str]] = []
        """Parts of a step: index of the first event, index of the first call, and name."""
        self.activations = 0
        self.memory.label(map(local, t.params.values()), Kind.parameters)
        for state in t.optimizer.state.values():
            self.memory.label(map(local, state.values()), Kind.optimizer)
        # Label the rest of the state now, so that later only memory of a step has no kind.
        self.memory.label_since(0, Kind.other)
        self.loss = t.model.loss
        t.model.loss = self.measured_loss  # type: ignore[method-assign]
        t.optimizer.register_step_pre_hook(lambda *_: self.begin("update"))

    def step(self, micro_batches: int) -> Step:
        """Run one training step; return its memory and collectives.

        The step runs at most SIMULATED of the `micro_batches`. For each micro-batch that does not
        run, the returned list of collectives repeats the collectives of the first micro-batch.
        """
        start = self.memory.now()
        train_step(self.t, self.batches(), 0, EVERYTHING)
        peak = self.memory.peak(start)
        part_of_peak = "build"
        # Index of the first call of each micro-batch.
        starts: list[int] = []
        for event, call, part in self.parts:
            # The last part that began before the peak contains the peak.
            if event <= peak.event:
                part_of_peak = part
            if part == FORWARD_PASS:
                starts.append(call)
        # All micro-batches except the last have the collectives of the first.
        calls_of_first: list[Call] = []
        if len(starts) > 1:
            calls_of_first = self.calls[starts[0] : starts[1]]
        n_skipped = max(0, micro_batches - len(starts))
        return Step(
            activations=self.activations,
            peak=peak,
            when=part_of_peak,
            calls=calls_of_first * n_skipped + self.calls,
        )

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        cfg = self.t.cfg
        micro, _ = cfg.micro_batches(dist.get_world_size())
        shape = (micro, cfg.seq_len)
        while True:
            # Without names, because a name would keep the tensors in memory until the next batch.
            yield torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)

    def begin(self, part: str) -> None:
        gradients = []
        for param in self.t.params.values():
            if param.grad is not None:
                gradients.append(local(param.grad))
        self.memory.label(gradients, Kind.gradients)
        self.parts.append((self.memory.now(), len(self.calls), part))

    def measured_loss(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self.begin(FORWARD_PASS)
        out = self.loss(*args, **kwargs)
        self.forward_ends()
        return out

    def forward_ends(self) -> None:
        gc.collect()  # compilation leaves reference cycles that contain activations
        start_of_forward = self.parts[-1][0]
        self.memory.label_since(start_of_forward, Kind.activations)
        self.activations = 0
        for block in self.memory.live.values():
            if block.kind is Kind.activations:
                self.activations += block.size
        self.begin("backward pass")


FORWARD_PASS = "forward pass"
