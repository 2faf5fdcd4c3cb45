"""Times, their spread, results as JSON and Markdown."""

import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from diffllm.config import load_config
from diffllm.distributed.world import join

Step = Callable[[], None]


def meta(device: torch.device) -> dict[str, Any]:
    """Return the device, the processor and the versions of a measurement, and the date."""
    threads = torch.get_num_threads()
    gpu = device.type == "cuda"
    has_peers = importlib.util.find_spec("transformers") is not None
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"{threads} CPU cores",
        "processor": processor(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": version("transformers") if has_peers else None,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """Return the processor's model name, with "AMX" if it has matrix units."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text() if cpu.is_file() else ""
    names = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")]
    return (names[0] if names else platform.processor()) + " with AMX" * ("amx_tile" in text)


def write(path: Path, device: torch.device, results: Any, **more: Any) -> None:
    """Write results as JSON, with `meta` and more facts."""
    text = json.dumps({**meta(device), **more, "results": results}, indent=2)
    path.write_text(text + "\n")


def join_alone(name: str | None = None) -> torch.device:
    """Begin a process group of this process only, and return its device.

    Args:
        name: "cpu" leaves a GPU unused; else the GPU is taken where there is one.
    """
    settings = load_config([]).distributed
    world = join(settings)
    device = torch.device("cpu") if name == "cpu" else world.device()
    world.init_process_group(device, settings)
    return device


@contextmanager
def alone(name: str | None = None) -> Iterator[torch.device]:
    """The device of a process group of this process only, which ends with the block."""
    device = join_alone(name)
    try:
        yield device
    finally:
        torch.distributed.destroy_process_group()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work; on a CPU nothing is to be waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Step, device: torch.device, repeats: int = 1) -> float:
    """Mean seconds of `repeats` steps, between which a GPU is not waited for."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and ends of quotients that are paired by round."""
    values = sorted(a / b for a, b in zip(over, under, strict=True))
    low, median, high = quartiles(values)
    return {"median": median, "low": low, "high": high, "min": values[0], "max": values[-1]}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile, interpolated."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def with_quartiles(ratio: dict[str, float]) -> str:
    """Median and quartiles of `ratios` as text, e.g. 1.06 (1.04 to 1.09)."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join([cells(columns), "|---" * len(columns) + "|", *map(cells, rows)])


def cells(row: Sequence[str]) -> str:
    """A line of such a table."""
    return f"| {' | '.join(row)} |"
