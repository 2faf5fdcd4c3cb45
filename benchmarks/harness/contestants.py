"""A contestant in a worker: its step is built, warmed up, and then made in turns with others.

A worker calls these functions with its `State`; what they return is written as JSON.
"""

import gc
import time
from typing import Any

import torch

from diffllm.config import TrainConfig, load_config
from diffllm.model.attention import kernels
from diffllm.model.attention.kernels import Kernel
from diffllm.model.auto_setting import ASKED, AutoSetting
from harness.kernels import breakdown
from harness.measuring import Step, join_alone, seconds, synchronize
from harness.steps import described, flops_per_token, mfus, ours, plain, theirs
from harness.worker import State

WARM = 3
"""Steps before the first turn."""


def device_of(state: State) -> torch.device:
    """The worker's device; the first call joins a process group of one."""
    if "joined" not in state:
        state["joined"] = join_alone(state["device"])
    return state["joined"]


def build_step(
    state: State,
    words: list[str],
    kind: str = "ours",
    precision: str = "bf16 autocast",
    compiled: bool = True,
    document_length: int | None = None,
    document_kernel: str | None = None,
) -> None:
    """Build a model and its optimizer.

    Args:
        words: overrides that make the config, for a peer its shape.
        kind: "ours", "plain", or a model of the transformers library.
        precision, compiled: of a peer; ours has its own in the config.
        document_kernel: a `Kernel` for documents on Hopper in place of the one that is chosen.
    """
    if document_kernel:
        kernels.DOCUMENTS_ON_HOPPER = AutoSetting(Kernel[document_kernel], ASKED)
    device = device_of(state)
    cfg = load_config(words)
    step: Step
    if kind == "ours":
        step = ours(cfg, device, document_length)
    elif kind == "plain":
        step = plain(cfg, precision, device, compiled)
    else:
        step = theirs(kind, cfg, precision, device, compiled)
    state["cfg"], state["step"] = cfg, step


def warm(state: State) -> dict[str, Any]:
    """Make the first steps, which compile; return how long they took and facts about a step."""
    cfg: TrainConfig = state["cfg"]
    device = device_of(state)
    start = time.perf_counter()
    for _ in range(WARM):
        state["step"]()
    synchronize(device)
    release(device)
    tokens = cfg.global_batch_size * cfg.seq_len
    return {
        "seconds": time.perf_counter() - start,
        "tokens": tokens,
        "shape": described(cfg),
        "mfu_of_a_second": mfus(flops_per_token(cfg.model), tokens, device),
    }


def turn(state: State, repeats: int) -> dict[str, Any]:
    """Time some steps: seconds a step, and the most bytes that tensors held (None on a CPU).

    A step before them, which is not timed, takes back the memory that `release` gave away.
    """
    device = device_of(state)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    state["step"]()
    taken = seconds(state["step"], device, repeats)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    release(device)
    return {"seconds": taken, "peak": peak}


def profile(state: State) -> dict[str, float]:
    """Milliseconds of a step by what they are spent on."""
    device = device_of(state)
    state["step"]()
    result = breakdown(state["step"], device)
    release(device)
    return result


def release(device: torch.device) -> None:
    """Leave the memory that is free to the others of a group."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
