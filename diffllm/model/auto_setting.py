"""Settings that are chosen for the device, each with the reason for the choice."""

from typing import Any, NamedTuple

import torch

ASKED = "asked for"


class AutoSetting(NamedTuple):
    """The chosen value of a setting that depends on the device, and the reason for the choice."""

    value: Any
    reason: str
    """A short phrase, printed in brackets after the value, e.g. "asked for"."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
