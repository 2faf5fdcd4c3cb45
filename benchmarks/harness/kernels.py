"""Time of a step or of one attention layer by kernel, from torch's profiler."""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from diffllm.config import load_config
from diffllm.model.attention.masks import Documents
from diffllm.training.build import for_json
from harness.decoding import random_model
from harness.machine import join_alone, synchronize, the_device
from harness.process import reason
from harness.steps import DOCUMENT_END, build_step, with_documents

WORK = "work of a measurement"
"""Name of the profiled range."""
LOSS = "_ChunkedLoss"
"""Name of the autograd function that runs the whole loss and its gradients."""
ATTENTION = r"flash|fmha|sdpa|attention|attn|varlen|mha_"
BACKWARD = r"bwd|backward|bprop|dkdv|dkv"
RULES = (
    # The first match counts. A fused pointwise graph has the names of all its fused operations.
    ("pointwise", r"^triton_(poi|red|per|for|mix)|cpp_fused"),
    ("attention backward", rf"(?=.*({ATTENTION}))(?=.*({BACKWARD}))|dot_do_o|convert_dq"),
    ("attention forward", ATTENTION),
    ("optimizer", r"adam|multi_tensor|foreach|norm_.*lpnorm"),
    ("products", r"gemm|nvjet|cutlass|cublas|wgmma|xmma|splitk|::(bmm|mm|addmm|_grouped_mm)$"
                 r"|linear|matmul|triton_tem"),
    ("casts and copies", r"memcpy|memset|copy|split_with_sizes|chunk_cat|nccl|::cat$|::fill_"
                         r"|catarray|fillfunctor"),
)  # fmt: skip
PARTS = ("loss", *dict(RULES), "idle")


def part_of(name: str) -> str:
    """Return the part of a step to which a kernel (on a CPU, an operation) belongs, by its name."""
    lowered = name.lower()
    return next((part for part, rule in RULES if re.search(rule, lowered)), "pointwise")


def step_breakdown(**contestant: Any) -> dict[str, float]:
    """Return the `profiled` parts of a step of `build_step` after two warm-up steps."""
    device = join_alone()
    _, step = build_step(device, **contestant)
    step()
    step()
    return profiled(step, device)


def profiled(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Run a step with the profiler; return its `breakdown` and `host_calls`."""
    events = list(traced(step, device))
    return breakdown(events, device) | host_calls(events, device)


def breakdown(events: list[Any], device: torch.device) -> dict[str, float]:
    """Return milliseconds of one step by part, from the times of kernels (on a CPU, operations).

    The rest of the step is "idle". Kernels that overlap count twice. The result is empty if the
    profiler records no kernels.
    """
    spent: Counter[str] = Counter()
    edges: list[float] = []
    for event in events:
        loss = under_loss(event)
        if us := own_us(event, device):
            spent["loss" if loss else part_of(event.name)] += us
            edges += [event.time_range.start, event.time_range.end]
        if loss and device.type == "cuda":  # a host operation of the loss that started kernels
            for kernel in event.kernels:
                spent["loss"] += kernel.duration
                spent[part_of(kernel.name)] -= kernel.duration
    if not edges:
        return {}
    span = max(edges) - min(edges)
    spent["idle"] = span - sum(spent.values())
    return {"step": span / 1e3, **{part: spent[part] / 1e3 for part in PARTS}}


def host_calls(events: list[Any], device: torch.device) -> dict[str, int]:
    """Count kernel launches, waits for the GPU, and possibly blocking copies of a traced step.

    Copies to the host, or from pageable memory, can block the host. The result is empty on a CPU.
    """
    if device.type == "cpu":
        return {}
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    end = max(event.time_range.end for event in on_host if event.name == WORK)
    copies = [event.name for event in events if event.name.startswith("Memcpy")]
    waits = [event for event in on_host if re.fullmatch(r"cuda\w+Synchronize", event.name)]
    return {
        "launches": sum(own_us(event, device) > 0 for event in events) - len(copies),
        "waits": sum(event.time_range.start < end for event in waits),  # The profiler waits later.
        "copies to host": sum("DtoH" in name for name in copies),
        "pageable copies": sum("Pageable" in name for name in copies),
    }


def kernel_times(work: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Return milliseconds by kernel (on a CPU, by operation), the longest first."""
    spent: Counter[str] = Counter()
    for event in traced(work, device):
        spent[event.name] += own_us(event, device)
    return {name: us / 1e3 for name, us in spent.most_common() if us}


def traced(work: Callable[[], Any], device: torch.device) -> Any:
    synchronize(device)
    with profile() as profiler:  # records the CPU, and a visible GPU
        with record_function(WORK):
            work()
        synchronize(device)
    return profiler.events()


def own_us(event: Any, device: torch.device) -> float:
    """Return an event's own microseconds: of a kernel or copy, or on a CPU of an operation.

    On a GPU, return 0 for host operations and annotated ranges.
    """
    if device.type == "cpu":
        return 0 if event.name == WORK else event.self_cpu_time_total
    is_kernel = event.device_type == DeviceType.CUDA and not event.is_user_annotation
    return event.time_range.elapsed_us() if is_kernel else 0


def under_loss(event: Any) -> bool:
    """Return whether the loss called the operation."""
    while event is not None and not event.name.startswith(LOSS):
        event = event.cpu_parent
    return event is not None


def kernels(words: list[str], widths: list[int], tokens: int) -> dict[str, Any]:
    """Return `kernels_of` or its error by head width, with and without masked documents."""
    found: dict[str, Any] = {}
    for width, masked in itertools.product(widths, (False, True)):
        name = f"d={width}{' documents' if masked else ''}"
        try:
            found[name] = kernels_of([*words, f"model.head_dim={width}"], tokens, masked)
        except Exception as error:
            found[name] = reason(error)
    return found


def kernels_of(words: list[str], tokens: int, masked: bool) -> dict[str, Any]:
    """Return device-dependent settings, and milliseconds by attention kernel of one layer.

    The passes are forward, backward and, without masked documents, a decoding step.

    Args:
        tokens: length of a sequence; the batch has two sequences.
    """
    device = the_device()
    cfg = load_config([*words, "model.n_layers=1", f"seq_len={tokens}"])
    dtype = torch.bfloat16
    resolved = cfg.model.attention.resolve(cfg.model, device)
    resolved.prepare(dtype, masked)
    chosen = resolved.choices(dtype, masked)
    model = random_model(cfg.model, device, dtype)
    attention = model.layers[0].attention
    inputs = torch.randint(1, cfg.model.vocab_size, (2, tokens))
    documents = None
    if masked:
        documents = Documents.of(with_documents(inputs, tokens // 8), DOCUMENT_END).to(device)
    rope, mask = model.whole_sequences(inputs.to(device), documents, dtype)
    x = torch.randn(2, tokens, cfg.model.dim, device=device, dtype=dtype, requires_grad=True)
    attention(x, rope, mask).sum().backward()  # compiles and chooses kernels
    out: list[torch.Tensor] = []
    passes = {
        "forward": kernel_times(lambda: out.append(attention(x, rope, mask)), device),
        "backward": kernel_times(lambda: out[0].backward(torch.ones_like(out[0])), device),
    }
    if not masked:
        cache = attention.new_cache(1, tokens, dtype, device)
        cache.k.normal_()
        cache.v.normal_()
        cache.length = tokens - 2
        with torch.no_grad():
            token, rope = x[:1, :1], model.rope(tokens - 1, 1)
            attention(token, model.rope(tokens - 2, 1), None, cache)  # chooses kernels
            passes["decoding"] = kernel_times(lambda: attention(token, rope, None, cache), device)
    named = {
        key: {n: ms for n, ms in times.items() if part_of(n).startswith("attention")}
        or dict(list(times.items())[:3])
        for key, times in passes.items()
    }
    return {"chosen": for_json(chosen), **named}
