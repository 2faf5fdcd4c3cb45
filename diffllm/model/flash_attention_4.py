"""Forward and backward kernels of flash-attn-4, in the form that torch's attention expects.

Before torch 2.15, torch expects exactly two outputs of the forward kernel.
"""

from typing import Any

from flash_attn.cute import interface
from torch import Tensor

_flash_attn_bwd = interface._flash_attn_bwd


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, log_sum_exp, *_ = interface._flash_attn_fwd(*args, **kwargs)
    return out, log_sum_exp
