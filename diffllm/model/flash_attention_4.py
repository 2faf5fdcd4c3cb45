"""The kernels of flash-attn-4 with the outputs that torch's dispatcher expects: two, before
torch 2.15."""

from typing import Any

from flash_attn.cute import interface
from torch import Tensor

_flash_attn_bwd = interface._flash_attn_bwd


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, log_sum_exp, *_ = interface._flash_attn_fwd(*args, **kwargs)
    return out, log_sum_exp
