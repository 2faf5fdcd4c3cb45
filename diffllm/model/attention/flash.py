"""The flash-attn package: which version is here, and whether it runs."""

import functools
import importlib.util

import torch
from torch.nn.attention import restore_flash_attention_impl
from torch.torch_version import TorchVersion

from diffllm.model.attention.ops import FLASH_4, Backend, Packed, flash, varlen

HOPPER_OR_BLACKWELL = (9, 10)
"""Major compute capabilities, of data-centre cards: where flash-attn-4 runs under torch."""
# Before, torch gave flash-attn-4 a window of -1 as one, and refused any in the backward pass.
VARLEN_TAKES_FLASH_4 = TorchVersion(torch.__version__) >= "2.12"
NEEDS_TORCH = f"flash-attn-4 masks documents from torch 2.12 on, this is {torch.__version__}"


def installed(module: str) -> bool:
    """Whether `module` could be imported; packages above it are."""
    return importlib.util.find_spec(module) is not None


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA's compute capability of `device`; zeros where there is no CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def flash_version(device: torch.device) -> int:
    """The newest version of flash-attn here that runs on `device`, 4 or 2; 0 without any."""
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
    """One small call of the flash-attn package, forward and backward; also with documents masked.

    Raises:
        Exception: whatever a package built for something else raises.
    """
    q = torch.ones(1, 8, 2, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = flash(q, q, q, 1.0).sum()
    if documents:
        boundaries = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
        out = out + varlen(q, q, q, Packed(boundaries, 8), 1.0, Backend.flash).sum()
    out.backward()


@functools.cache
def flash_4_fault(device: torch.device, width: int) -> str:
    """Why flash-attn-4 does not mask documents on `device`; "" where it does, and from then on it
    stands in for torch's own flash kernels."""
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
