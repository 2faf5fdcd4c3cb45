"""Model FLOPs utilisation: the formula and what devices can do, in one place.

MFU = training FLOPs of the model (forward and backward matrix products, attention counted
causally, no recomputation) / time / the device's dense bf16 peak (PaLM, arXiv 2204.02311,
appendix B).
"""

from typing import NamedTuple

import torch


class Device(NamedTuple):
    """A GPU's figures from its data sheet."""

    name: str
    peak_flops: float
    """Dense bf16 matrix FLOP/s."""
    memory_gib: float
    """GiB that the driver leaves to a process."""


DEVICES = (
    # A device is the first of these whose name is part of its own.
    Device("GB200", 2.5e15, 184.0),
    Device("B200", 2.25e15, 178.0),
    Device("GH200", 989.4e12, 94.5),
    Device("H200", 989.4e12, 139.8),
    Device("H100 PCIe", 756e12, 79.1),
    Device("H100 NVL", 835e12, 93.0),
    Device("H100", 989.4e12, 79.1),
    Device("A100", 312e12, 79.1),
    Device("L40S", 362e12, 44.4),
    Device("MI300X", 1307.4e12, 191.5),
)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device, or None where the table does not know it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((known.peak_flops for known in DEVICES if known.name in name), None)


def device_called(name: str) -> Device | None:
    """The device that a person calls `name`, in any case, with or without separators."""
    return next((known for known in DEVICES if plain(known.name) == plain(name)), None)


def plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def mfu(flops_per_token: float, tokens_per_s_per_device: float, peak: float) -> float:
    """Return the share of the peak in FLOP/s."""
    return flops_per_token * tokens_per_s_per_device / peak
