"""Predict the parts of a training step from its FLOPs and bytes, and measure the same parts.

FLOPs and bytes of compiled layers come from Inductor's schedule. The remaining bytes are counted
here, for a model without mixtures on one rank.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V

from diffllm.config import TrainConfig
from diffllm.config.matching import totals
from diffllm.model.loss import loss_chunk
from harness.kernels import profiled
from harness.machine import ceilings, join_alone
from harness.steps import build_step

OPTIMIZER_BYTES = 4 + 32 + 6
"""Bytes per parameter: norm of the gradient; AdamW, which also clips; copy in bf16."""
CAST_BYTES = 6
"""Bytes per parameter: cast of the gradient from bf16 to float32."""


class Rates(NamedTuple):
    """Assumed speed of a device, in bf16."""

    products: float
    """FLOP/s of matrix products."""
    attention: float
    """FLOP/s of attention kernels, counting only visible keys."""
    memory: float
    """Bytes/s, read plus written."""


RATES = {"H200": Rates(650e12, 480e12, 4.0e12), "H100": Rates(650e12, 480e12, 3.0e12)}
"""Assumptions by a part of the device name; none of them is measured."""


class Kernel(NamedTuple):
    """A kernel of a compiled graph."""

    loss: bool
    """Whether the kernel belongs to the loss instead of a layer."""
    part: str
    """Part of a step, as in `breakdown`."""
    work: float
    """FLOPs of products and attention; for pointwise kernels, bytes read and written."""
    operations: str


def roofline(words: list[str]) -> dict[str, dict[str, float]]:
    """Return "measured" (if the profiler records kernels) and "predicted" milliseconds by part.

    On devices missing from `RATES`, measure the rates; attention gets the rate of products.
    """
    device = join_alone()
    with scheduled() as kernels:
        cfg, step = build_step(device, words)
        step()
    step()
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    rates = next((rate for part, rate in RATES.items() if part in name), None)
    if rates is None:
        found = ceilings(size=1024, mib=64)
        flops = found["tflops"] * 1e12
        rates = Rates(flops, flops, found["gb_per_s"] * 1e9)
    for kernel in largest(kernels, cfg, device):
        print(kernel)
    expected = {"predicted": predicted(cfg, device, kernels, rates)}
    measured = profiled(step, device)
    return {"measured": measured, **expected} if "step" in measured else expected


def predicted(
    cfg: TrainConfig, device: torch.device, kernels: list[Kernel], rates: Rates
) -> dict[str, float]:
    """Return the milliseconds of a step by part.

    Assume that products and memory transfers do not overlap.
    """
    runs, work = runs_of(cfg, device), Counter[tuple[bool, str]]()
    for kernel in kernels:
        work[kernel.loss, kernel.part] += runs[kernel.loss] * kernel.work
    model, tokens = cfg.model, cfg.global_batch_size * cfg.seq_len
    output, count = model.vocab_size * model.dim, totals(model)["params"]
    # The gradients of hidden states and output weight are products outside of compiled graphs.
    products = work[True, "products"] + 4 * output * tokens
    # Each chunk reads and writes the weight's gradient in float32, except that the first writes.
    sums = 4 * output * (2 * runs[True] - 1)
    seconds = {
        "products": work[False, "products"] / rates.products,
        "attention forward": work[False, "attention forward"] / rates.attention,
        "attention backward": work[False, "attention backward"] / rates.attention,
        "pointwise": work[False, "pointwise"] / rates.memory,
        "loss": products / rates.products + (work[True, "pointwise"] + sums) / rates.memory,
        "optimizer": OPTIMIZER_BYTES * count / rates.memory,
        "casts and copies": CAST_BYTES * count / rates.memory,
        "idle": 0.0,
    }
    return {"step": 1e3 * sum(seconds.values()), **{k: 1e3 * s for k, s in seconds.items()}}


def largest(kernels: list[Kernel], cfg: TrainConfig, device: torch.device) -> list[str]:
    """Return the ten pointwise kernels with most bytes per step, as "MB, operations"."""
    runs = runs_of(cfg, device)
    of_step = [(runs[k.loss] * k.work, k.operations) for k in kernels if k.part == "pointwise"]
    return [f"{size / 1e6:.0f} MB, {names}" for size, names in sorted(of_step, reverse=True)[:10]]


def runs_of(cfg: TrainConfig, device: torch.device) -> dict[bool, int]:
    """Return how often a step runs the kernels of a layer (False) and of the loss (True)."""
    size, count = cfg.micro_batches(1)
    model = cfg.model
    chunk = loss_chunk(model.loss_chunk, device, model.vocab_size, model.dim).value
    return {False: count * model.n_layers, True: count * math.ceil(size * cfg.seq_len / chunk)}


@contextmanager
def scheduled() -> Iterator[list[Kernel]]:
    """Collect the kernels of all graphs that Inductor compiles in the context.

    Caches are disabled, because Inductor does not schedule cached graphs.
    """
    found: list[Kernel] = []
    codegen = Scheduler.codegen

    def collect(self: Scheduler) -> Any:
        loss = V.graph.is_inference  # the loss computes its gradients in the forward pass
        found.extend(kernel for node in self.nodes if (kernel := described(node, loss)))
        return codegen(self)

    Scheduler.codegen = collect  # type: ignore[method-assign]
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            yield found
    finally:
        Scheduler.codegen = codegen  # type: ignore[method-assign]


def described(node: BaseSchedulerNode, loss: bool) -> Kernel | None:
    """Return the part and work of a kernel; None for a kernel of a library without FLOPs.

    Triton templates, such as FlexAttention, count as pointwise.
    """
    if not isinstance(node, ExternKernelSchedulerNode):
        origins = {str(o.target) for n in node.get_nodes() for o in getattr(n.node, "origins", ())}
        names = sorted({name.split(".")[1] for name in origins if "." in name})
        return Kernel(loss, "pointwise", node.get_read_write_buffers_sizes(), ", ".join(names))
    kernel: Any = node.node
    name = str(getattr(kernel, "op_overload", None) or kernel.python_kernel_name)
    if "attention" not in name:
        flops = node.estimate_flops()
        return Kernel(loss, "products", flops, name) if flops else None
    backward = "backward" in name
    q, k, v = (list(map(int, x.get_size())) for x in kernel.inputs[backward : backward + 3])
    # Causal: each query sees half of the keys. Multiplying and adding are 2 FLOPs.
    scores, values = (math.prod(q[:-1]) * k[-2] * width for width in (q[-1], v[-1]))
    # The backward pass recomputes the scores; gradients of q and k, of values and weights follow.
    flops = 3 * scores + 2 * values if backward else scores + values
    return Kernel(loss, "attention backward" if backward else "attention forward", flops, name)
