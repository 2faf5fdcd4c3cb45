"""The flash-attn package: the version that is installed, and whether it runs on a device."""

import functools
import importlib.util

import torch
from torch.nn.attention import restore_flash_attention_impl

from diffllm.core.torch_versions import NEEDS_TORCH, VARLEN_TAKES_FLASH_4
from diffllm.model.attention.ops import FLASH_4, Backend, Packed, flash, varlen

HOPPER_OR_BLACKWELL = (9, 10)
"""Major compute capabilities of the data-centre GPUs on which flash-attn-4 runs under torch."""


def installed(module: str) -> bool:
    """Whether `module` could be imported; imports the packages that it is in."""
    return importlib.util.find_spec(module) is not None


def capability(device: torch.device) -> tuple[int, int]:
    """Return CUDA's compute capability of `device`; zeros where there is no CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def flash_version(device: torch.device) -> int:
    """Return the newest version of flash-attn here that runs on `device`, 4 or 2; 0 without any."""
    if not installed("flash_attn"):
        return 0
    if capability(device)[0] in HOPPER_OR_BLACKWELL and installed("flash_attn.cute"):
        return 4
    return 2 if installed("flash_attn.flash_attn_interface") else 0


def activate_flash_4() -> None:
    """Let flash-attn-4 take the place of torch's own flash kernels.

    Through torch's dispatcher it compiles without a graph break.
    """
    from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
    from torch.nn.attention._fa4 import register_flash_attention_fa4

    register = functools.partial(register_flash_attention_fa4, FLASH_4)
    register_flash_attention_impl(FLASH_4, register_fn=register)
    activate_flash_attention_impl(FLASH_4)


def try_flash(device: torch.device, width: int, documents: bool = False) -> None:
    """Make one small call of the flash-attn package, forward and backward, and with `documents`
    another with these masked; raises anything if it is built for another torch or GPU."""
    q = torch.ones(1, 8, 2, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = flash(q, q, q, 1.0).sum()
    if documents:
        boundaries = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
        out = out + varlen(q, q, q, Packed(boundaries, 8), 1.0, Backend.flash).sum()
    out.backward()


@functools.cache
def flash_4_fault(device: torch.device, width: int) -> str:
    """Return the reason why flash-attn-4 cannot mask documents on `device`, or "" if it can.

    If it can, it takes the place of torch's own flash kernels from here on.
    """
    try:
        if flash_version(device) != 4:
            return "flash-attn-4 is not installed"
        if not VARLEN_TAKES_FLASH_4:
            return NEEDS_TORCH
        activate_flash_4()
        try_flash(device, width, documents=True)
    except Exception as error:
        restore_flash_attention_impl(_raise_warn=False)
        return f"flash-attn-4 fails: {type(error).__name__}: {error}".splitlines()[0]
    return ""
