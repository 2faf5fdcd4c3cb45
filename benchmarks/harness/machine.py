"""Facts about the machine, ceilings of its speed, and the tests that need a GPU."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from typing import Any

import torch

from harness.measuring import Step, meta, seconds
from harness.records import ROOT
from harness.worker import State

FAILURES = 20
"""Failed tests that a result names."""
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


def tests(state: State, file: str, limit: float, at_once: int) -> dict[str, Any]:
    """Run the gpu-marked tests of a file: how many ended how, and which failed and why.

    Args:
        limit: seconds after which they are killed; tests that have ended by then count.
        at_once: tests at the same time on a GPU.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "-m", "gpu", file]
    command += ["-p", "no:cacheprovider", "--tb=line"]
    if state["device"] == "cuda" and importlib.util.find_spec("xdist"):
        command += ["-n", str(at_once)]
    ended = "in time"
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=with_path(), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"killed after {limit:.0f} s"
        output.seek(0)
        text = output.read()
    print(text, flush=True)  # into the worker's log
    outcomes = test_outcomes(text)
    failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    lines = re.findall(r"^(?:FAILED|ERROR) (\S+) - (.*)$", text, re.MULTILINE)
    return {
        "counts": dict(Counter(outcomes.values())),
        "ended": ended,
        "failed": failed[:FAILURES],
        "reasons": {name: reason[:200] for name, reason in lines[:FAILURES]},
        "exit_code": process.returncode,
    }


def test_outcomes(text: str) -> dict[str, str]:
    """Outcome by test, read from the output of `pytest -v`, with workers of xdist or without."""
    outcomes = {}
    for line in text.splitlines():
        alone = re.match(r"(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", line)
        shared = re.match(r"\[gw\d+\].*? (PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S+::.+?)\s*$", line)
        if alone:
            outcomes[alone[1]] = alone[2]
        elif shared:
            outcomes[shared[2]] = shared[1]
    return outcomes


def with_path() -> dict[str, str]:
    """This process's environment, with the package on PYTHONPATH, as it may not be installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
