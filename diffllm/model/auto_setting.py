"""Settings whose value depends on the device, with the reason for each value."""

from typing import Any, NamedTuple

import torch

ASKED = "asked for"


class AutoSetting(NamedTuple):
    """The value of a setting that depends on the device, and the reason for the value."""

    value: Any
    reason: str
    """A short phrase, printed in brackets after the value, e.g. "asked for"."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
