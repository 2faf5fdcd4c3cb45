"""The settings that a config leaves to the device, decided before anything is built."""

from enum import Enum
from typing import Any

import torch

from diffllm.config import Precision
from diffllm.model.choice import ASKED, Choice
from diffllm.model.dtypes import dtype_name

WORTH_COMPILING = 5e13
"""Training FLOPs of one rank above which compiling clearly saves time on a CPU."""
KEPT = "as in the checkpoint"


def chosen_precision(precision: Precision, device: torch.device) -> Choice:
    """Choose the dtype of the computation; left open, bfloat16 on devices with units for it."""
    if precision is not Precision.auto:
        return Choice(torch.bfloat16 if precision is Precision.bf16 else torch.float32, ASKED)
    if device.type == "cuda":
        name, has_units = "this GPU", torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        name = "this CPU"
        has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if has_units:
        return Choice(torch.bfloat16, f"{name} has bf16 units")
    return Choice(torch.float32, f"{name} has no bf16 units")


def chosen_compile(
    compile: bool | None,
    device: torch.device,
    flops: float = 0.0,
    kept: bool | None = None,
) -> Choice:
    """Whether blocks and loss are compiled; left open, they are on GPUs and in long runs on CPUs.

    Args:
        compile: the config's value; None leaves it open.
        flops: training FLOPs of this rank in the whole run; 0 counts as a short run.
        kept: the choice in the checkpoint that the run resumes, which a CPU keeps.
    """
    if compile is not None:
        return Choice(compile, ASKED)
    if device.type == "cuda":
        return Choice(True, "a GPU runs long enough")
    if kept is None and flops < WORTH_COMPILING:
        needed = f"{WORTH_COMPILING:.0e} training FLOPs per rank"
        return Choice(False, f"short run: {flops:.0e}, compiling needs {needed}")
    if kept is False:
        return Choice(False, KEPT)
    if fault := compiler_fault():
        return Choice(False, fault)
    return Choice(True, KEPT if kept else f"long run: {flops:.0e} training FLOPs per rank")


def compiler_fault() -> str:
    """Say why Inductor cannot compile for this CPU, in one line; empty if it can."""
    try:
        torch.compile(torch.sin, fullgraph=True)(torch.ones(1))
    except Exception as error:  # no compiler, a broken one, no headers, a full disk
        cause = str(error).strip().splitlines() or [repr(error)]
        return f"torch.compile fails: {cause[0]}"
    return ""


def for_json(choices: dict[str, Choice]) -> dict[str, dict[str, Any]]:
    """Return choices as run.json has them: {"value": ..., "reason": ...} by name."""
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
