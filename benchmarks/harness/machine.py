"""Facts about the machine, and ceilings of its speed."""

import importlib.metadata
import os
import platform
from importlib.metadata import version
from typing import Any

import torch
from measuring import Step, meta, seconds

from harness.worker import State

PACKAGES = ("triton", "transformers", "flash_attn", "numpy", "hydra-core")


def facts(state: State) -> dict[str, Any]:
    """Versions, the device, and the CUDA libraries that are loaded, which should be torch's own."""
    device = torch.device(state["device"])
    found = {
        **meta(device),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: installed(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "ld_library_path": os.environ.get("LD_LIBRARY_PATH", ""),
        "libraries": loaded_libraries(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": properties.total_memory / 2**30,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "libraries": loaded_libraries(),  # now that CUDA has been used
        }
    return found


def installed(name: str) -> str | None:
    """A package's version; None if it is not installed."""
    try:
        return version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def loaded_libraries() -> list[str]:
    """Files that this process has cuDNN, cuBLAS and NCCL from; torch's lie in site-packages."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/" in line}
    wanted = ("libcudnn.", "libcudnn_graph", "libcublas.", "libnccl.")
    return sorted(path for path in paths if any(name in path for name in wanted))


def product(state: State, size: int) -> dict[str, float]:
    """TFLOP/s of a bf16 product of two random square matrices, a ceiling for MFU."""
    device = torch.device(state["device"])
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    taken = repeated(lambda: torch.mm(a, b), device)
    return {"tflops": 2 * size**3 / taken / 1e12, "ms": 1e3 * taken}


def copy(state: State, mib: int) -> dict[str, float]:
    """GB/s of a copy on the device, bytes read and written."""
    device = torch.device(state["device"])
    source = torch.randn(mib * 2**18, device=device)
    target = torch.empty_like(source)
    taken = repeated(lambda: target.copy_(source), device)
    return {"gb_per_s": 2 * source.nbytes / taken / 1e9, "ms": 1e3 * taken}


def repeated(work: Step, device: torch.device) -> float:
    """Seconds that `work` takes, the mean of ten times after three that warm up."""
    seconds(work, device, 3)
    return seconds(work, device, 10)
