"""The time of a step or of one attention layer, by the kernels that the profiler saw."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from diffllm.config import load_config
from diffllm.model.attention.ops import Documents
from diffllm.training.build import for_json
from harness.decoding import random_model
from harness.measuring import synchronize
from harness.steps import DOCUMENT_END, with_documents
from harness.worker import State

LOSS = "_ChunkedLoss"
"""The autograd function under which all of the loss runs, its gradients too."""
ATTENTION = r"flash|fmha|sdpa|attention|attn|varlen|mha_"
BACKWARD = r"bwd|backward|bprop|dkdv|dkv"
RULES = (
    # The first that matches. Pointwise graphs carry the names of all that they fuse.
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
    """The part of a step that a kernel, or on a CPU an operation, belongs to by its name."""
    lowered = name.lower()
    return next((part for part, rule in RULES if re.search(rule, lowered)), "pointwise")


def breakdown(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Milliseconds of one step by part; `idle` is when the device computes nothing.

    On a CPU the parts are operations' own times, and `idle` what is outside of all operations.
    """
    events = traced(step, device)
    spent: Counter[str] = Counter()
    if device.type == "cuda":
        work = [event for event in events if is_kernel(event)]
        for event in work:
            spent[part_of(event.name)] += event.time_range.elapsed_us()
        for event in events:
            if event.kernels and under_loss(event):
                for kernel in event.kernels:
                    spent["loss"] += kernel.duration
                    spent[part_of(kernel.name)] -= kernel.duration
        ranges = [(event.time_range.start, event.time_range.end) for event in work]
    else:
        work = [event for event in events if event.device_type == DeviceType.CPU]
        for event in work:
            part = "loss" if under_loss(event) else part_of(event.name)
            spent[part] += event.self_cpu_time_total
        ranges = [(e.time_range.start, e.time_range.end) for e in work if e.cpu_parent is None]
    span, busy = span_and_busy(ranges)
    spent["idle"] = span - busy
    return {**{part: spent[part] / 1e3 for part in PARTS}, "step": span / 1e3}


def kernel_times(work: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of every kernel, or on a CPU operation, of some work, the longest first."""
    spent: Counter[str] = Counter()
    for event in traced(work, device):
        if device.type == "cuda" and is_kernel(event):
            spent[event.name] += event.time_range.elapsed_us()
        if device.type == "cpu" and event.self_cpu_time_total:
            spent[event.name] += event.self_cpu_time_total
    return {name: us / 1e3 for name, us in spent.most_common()}


def traced(work: Callable[[], Any], device: torch.device) -> Any:
    """The profiler's events of some work."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    synchronize(device)
    with profile(activities=activities) as profiler:
        work()
        synchronize(device)
    return profiler.events()


def is_kernel(event: Any) -> bool:
    """Whether a GPU computed or copied, rather than that a range was marked on it."""
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def under_loss(event: Any) -> bool:
    """Whether an operation was called by the loss."""
    while event is not None:
        if event.name.startswith(LOSS):
            return True
        event = event.cpu_parent
    return False


def span_and_busy(ranges: list[tuple[float, float]]) -> tuple[float, float]:
    """From the first start to the last end, and how much of it lies in any range."""
    if not ranges:
        return 0.0, 0.0
    ranges = sorted(ranges)
    busy, (start, end) = 0.0, ranges[0]
    for low, high in ranges[1:]:
        if low > end:
            busy, start, end = busy + end - start, low, high
        else:
            end = max(end, high)
    return end - ranges[0][0], busy + end - start


def kernels(
    state: State, words: list[str], widths: list[int], backends: list[str], tokens: int
) -> dict[str, Any]:
    """The attention kernels that one layer runs in a forward pass, a backward pass and a decoding
    step, by width of heads, backend and mask; the error of a case that cannot run in its place.

    Args:
        tokens: of the sequence; two of them are a batch.
    """
    found: dict[str, Any] = {}
    for width in widths:
        for backend in backends:
            for masked in (False, True):
                name = f"d={width} {backend}{' documents' if masked else ''}"
                more = [f"model.head_dim={width}", f"model.attention.backend={backend}"]
                try:
                    found[name] = kernels_of([*words, *more], tokens, masked, state["device"])
                except Exception as error:
                    reason = (str(error).strip().splitlines() or [""])[0][:200]
                    found[name] = {"error": f"{type(error).__name__}: {reason}"}
    return found


def kernels_of(words: list[str], tokens: int, masked: bool, name: str) -> dict[str, Any]:
    """Choices that the config leaves to the device, and milliseconds by attention kernel of a
    forward pass, a backward pass and a decoding step.

    Args:
        masked: whether documents are masked.
        name: of the device.
    """
    device = torch.device(name)
    cfg = load_config([*words, "model.n_layers=1", f"seq_len={tokens}"])
    dtype = torch.bfloat16
    cfg.model.attention.prepare(cfg.model, device, dtype, masked)
    chosen = cfg.model.attention.choices(cfg.model, device, dtype, masked)
    model = random_model(cfg.model, device, dtype)
    attention = model.layers[0].attention
    inputs = torch.randint(1, cfg.model.vocab_size, (2, tokens))
    documents = None
    if masked:
        documents = Documents.of(with_documents(inputs, tokens // 8), DOCUMENT_END).to(device)
    rope, mask = model.whole_sequences(inputs.to(device), documents, dtype)
    x = torch.randn(2, tokens, cfg.model.dim, device=device, dtype=dtype, requires_grad=True)
    attention(x, rope, mask).sum().backward()  # compiles, and tries kernels out
    out: list[torch.Tensor] = []
    passes = {
        "forward": kernel_times(lambda: out.append(attention(x, rope, mask)), device),
        "backward": kernel_times(lambda: out[0].backward(torch.ones_like(out[0])), device),
    }
    if not masked:
        passes["decoding"] = decoding_kernels(attention, model, tokens, device)
    named = {
        key: {n: ms for n, ms in times.items() if part_of(n).startswith("attention")}
        or dict(list(times.items())[:3])
        for key, times in passes.items()
    }
    return {"chosen": for_json(chosen), **named}


@torch.no_grad()
def decoding_kernels(
    attention: Any, model: Any, tokens: int, device: torch.device
) -> dict[str, float]:
    """Milliseconds by kernel of a decoding step with `tokens` - 1 keys before it."""
    cache = attention.new_cache(1, tokens, torch.bfloat16, device)
    cache.k.normal_()
    cache.v.normal_()
    cache.length = tokens - 2
    x = torch.randn(1, 1, model.cfg.dim, device=device, dtype=torch.bfloat16)
    attention(x, model.rope(tokens - 2, 1), None, cache)
    return kernel_times(lambda: attention(x, model.rope(tokens - 1, 1), None, cache), device)
