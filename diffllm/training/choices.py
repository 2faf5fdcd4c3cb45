"""The settings that a config leaves to the device, decided before anything is built."""

import contextlib
import hashlib
import os
import platform
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diffllm.config import Precision, TrainConfig
from diffllm.core.torch_versions import CPU
from diffllm.model.auto_setting import ASKED, AutoSetting, dtype_name

WORTH_COMPILING = 5e13
"""Training FLOPs of one rank above which compiling clearly saves time on a CPU."""
KEPT = "as in the checkpoint"


def chosen_precision(precision: Precision, device: torch.device) -> AutoSetting:
    """Choose the compute dtype; "auto" takes bfloat16 if the device has bf16 units."""
    if precision is not Precision.auto:
        return AutoSetting(torch.bfloat16 if precision is Precision.bf16 else torch.float32, ASKED)
    if device.type == "cuda":
        name, has_units = "this GPU", torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        name = "this CPU"
        has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if has_units:
        return AutoSetting(torch.bfloat16, f"{name} has bf16 units")
    return AutoSetting(torch.float32, f"{name} has no bf16 units")


def chosen_compile(
    compile: bool | None,
    device: torch.device,
    flops: float = 0.0,
    kept: bool | None = None,
) -> AutoSetting:
    """Choose whether to compile; by default on GPUs, and on CPUs for long runs.

    Args:
        compile: the config's value; None leaves it open.
        flops: training FLOPs of this rank in the whole run; 0 counts as a short run.
        kept: the choice in the checkpoint that the run resumes, which a CPU keeps.
    """
    if compile is not None:
        return AutoSetting(compile, ASKED)
    if device.type == "cuda":
        return AutoSetting(True, "a GPU runs long enough")
    if kept is None and flops < WORTH_COMPILING:
        needed = f"{WORTH_COMPILING:.0e} training FLOPs per rank"
        return AutoSetting(False, f"short run: {flops:.0e}, compiling needs {needed}")
    if kept is False:
        return AutoSetting(False, KEPT)
    if fault := compiler_fault():
        return AutoSetting(False, fault)
    return AutoSetting(True, KEPT if kept else f"long run: {flops:.0e} training FLOPs per rank")


def agreed_compile(cfg: TrainConfig, device: torch.device, kept: bool | None) -> AutoSetting:
    """Decide on all ranks alike whether the run compiles. Every rank must call this.

    All variants of one shape get the same choice, even if their FLOPs differ.

    Args:
        kept: the choice in the checkpoint that the run resumes; None without a checkpoint.
    """
    model, tokens = cfg.model, cfg.steps * cfg.global_batch_size * cfg.seq_len
    weights = 12 * model.n_layers * model.dim**2 + model.vocab_size * model.dim  # about
    flops = 6 * tokens * weights / dist.get_world_size()
    if device.type == "cpu" and (cfg.compile or kept or flops >= WORTH_COMPILING):
        keep_compiled_code()
    choice = chosen_compile(cfg.compile, device, flops, kept)
    everywhere = torch.tensor(int(choice.value), device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if choice.value and not everywhere:
        return AutoSetting(False, "torch.compile fails on another rank")
    return choice


def keep_compiled_code() -> None:
    """Let Inductor keep compiled code in the user's cache, which survives a restart of the machine.

    Other users may share data.cache_dir, and Inductor runs the code that it finds. Nodes that share
    a home directory may have different CPUs, so the code of each CPU type has its own folder.
    """
    # The home directory may be missing or not writable.
    with contextlib.suppress(OSError, RuntimeError):
        cpu = hashlib.sha256(f"{platform.machine()} {sorted(CPU.items())}".encode()).hexdigest()
        folder = Path("~/.cache/diffllm").expanduser() / f"inductor-{cpu[:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def compiler_fault() -> str:
    """Say why Inductor cannot compile for this CPU, in one line; empty if it can."""
    try:
        torch.compile(torch.sin, fullgraph=True)(torch.ones(1))
    except Exception as error:  # no compiler, a broken one, no headers, a full disk
        cause = str(error).strip().splitlines() or [repr(error)]
        return f"torch.compile fails: {cause[0]}"
    return ""


def for_json(choices: dict[str, AutoSetting]) -> dict[str, dict[str, Any]]:
    """Return choices as JSON: {"value": ..., "reason": ...} by name."""
    return {
        name: {"value": plain(value), "reason": reason} for name, (value, reason) in choices.items()
    }


def plain(value: Any) -> Any:
    """Return the value of a choice in a type that JSON has; dtypes and enum members become text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return value if isinstance(value, (bool, int)) else str(value)
