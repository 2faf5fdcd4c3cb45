"""Forward and backward kernels of flash-attn-4, with the signatures that torch's SDPA expects.

For torch before 2.15, the forward kernel must return only the attention output and log-sum-exp.
"""

from typing import Any

from flash_attn.cute import interface
from torch import Tensor

_flash_attn_bwd = interface._flash_attn_bwd


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, log_sum_exp, *_ = interface._flash_attn_fwd(*args, **kwargs)
    return out, log_sum_exp
