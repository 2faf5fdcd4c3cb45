"""Dtypes: their names, and those that sums and scores are computed in."""

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32 for narrower dtypes, so that float64, as tests use it, stays float64."""
    return torch.promote_types(dtype, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """The name without its module, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")
