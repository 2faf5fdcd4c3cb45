"""The kernels of flash-attn-4 in the shape that torch's dispatcher asks of them.

torch 2.13 expects output and log-sum-exp from the forward pass, and the package returns more since
4.0.0b19; torch 2.15 takes either.
"""

from typing import Any

from flash_attn.cute import interface
from torch import Tensor

_flash_attn_bwd = interface._flash_attn_bwd


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, log_sum_exp, *_ = interface._flash_attn_fwd(*args, **kwargs)
    return out, log_sum_exp
