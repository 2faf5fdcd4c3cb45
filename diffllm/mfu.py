"""Model FLOPs utilisation: the formula and the peaks, in one place.

MFU = training FLOPs of the model (forward and backward matrix products, attention counted
causally, no recomputation) / time / the device's dense bf16 peak (PaLM, arXiv 2204.02311,
appendix B).
"""

import torch

PEAK_BF16_FLOPS = (
    # Dense bf16 matrix FLOP/s from the vendors' data sheets; the first name that matches counts.
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989.4e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1307.4e12),
)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device, or None where the table does not know it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_BF16_FLOPS if key in name), None)


def mfu(flops_per_token: float, tokens_per_s_per_device: float, peak: float | None) -> float | None:
    """Share of the peak, or None for an unknown device."""
    return None if peak is None else flops_per_token * tokens_per_s_per_device / peak
