"""Names of dtypes, and the dtype that sums and scores are computed in."""

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for narrower dtypes, else the dtype itself: tests use float64."""
    return torch.promote_types(dtype, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")
