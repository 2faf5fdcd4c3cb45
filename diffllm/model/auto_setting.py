"""Settings that the device decides, with the reason of each decision."""

from typing import Any, NamedTuple

import torch

ASKED = "asked for"


class AutoSetting(NamedTuple):
    """The value of a setting that the config leaves to the device, and the reason for the value."""

    value: Any
    reason: str
    """A short phrase that is printed in brackets after the value, e.g. "asked for"."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
