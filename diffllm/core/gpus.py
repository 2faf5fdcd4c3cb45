"""Peak FLOP/s and memory of GPUs, from their data sheets."""

import re
from typing import NamedTuple


class Device(NamedTuple):
    """A GPU model. `peak_flops` is the dense bf16 FLOP/s in the data sheet."""

    name: str
    peak_flops: float
    memory_gib: float
    """GiB that the driver makes available to a process."""


DEVICES = (
    # The first entry whose name is part of the GPU's name applies, so longer names come first.
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


def device_named(name: str) -> Device | None:
    """Return the entry of DEVICES with this name, in any case and punctuation, else None."""
    by_name = {re.sub(r"\W", "", device.name.lower()): device for device in DEVICES}
    return by_name.get(re.sub(r"[\W_]", "", name.lower()))
