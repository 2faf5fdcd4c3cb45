"""Names of dtypes."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")
