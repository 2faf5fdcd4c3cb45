"""Device of a measurement, timing, and facts about the machine."""

import os
import time
from collections.abc import Callable
from importlib.metadata import distributions
from typing import Any

import torch

from diffllm.config import load_config
from diffllm.core.torch_versions import CPU_CAPABILITIES
from diffllm.distributed.world import join
from diffllm.training.provenance import provenance

Step = Callable[[], None]
LIBRARIES = ("libcudnn.", "libcudnn_graph", "libcublas.", "libnccl.")
PACKAGES = ("triton", "transformers")  # versions that a run does not record


def the_device() -> torch.device:
    """Return the GPU, or the CPU if there is no visible GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def join_alone() -> torch.device:
    """Initialise a process group of one process and return its device."""
    settings = load_config([]).distributed
    world = join(settings)
    device = world.device()
    world.init_process_group(device, settings)
    return device


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all its work; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Step, device: torch.device, repeats: int = 1) -> float:
    """Return mean seconds per step over `repeats` steps, without synchronisation between steps."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def facts() -> dict[str, Any]:
    """Return the device, versions and loaded CUDA libraries (expected: bundled with torch)."""
    device = the_device()
    found = {
        "type": device.type,
        "device": f"{torch.get_num_threads()} CPU cores",
        "processor": CPU_CAPABILITIES.get("cpu_name"),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "ld_library_path": os.environ.get("LD_LIBRARY_PATH", ""),
        **{each.name: each.version for each in distributions() if each.name in PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
        "git": provenance()["git"],
        "environment": provenance()["environment"] | {"host": ""},  # results may be published
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": properties.total_memory / 2**30,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "/" in line}
    loaded = sorted(path for path in paths if any(name in path for name in LIBRARIES))
    return {**found, "libraries": loaded}


def ceilings(size: int, mib: int) -> dict[str, float]:
    """Return TFLOP/s of a bf16 matrix product, and GB/s (read plus written) of a copy.

    Args:
        size: rows and columns of both matrices.
        mib: size of the copied tensor in MiB.
    """
    device = the_device()
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(mib * 2**18, device=device)
    target = torch.empty_like(source)
    for repeats in (3, 10):  # the first round is the warm-up
        product = seconds(lambda: torch.mm(a, b), device, repeats)
        copy = seconds(lambda: target.copy_(source), device, repeats)
    return {"tflops": 2 * size**3 / product / 1e12, "gb_per_s": 2 * source.nbytes / copy / 1e9}
