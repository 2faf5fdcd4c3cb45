"""Which collective this process is in, from torch's flight recorder."""

import json
import os
import time
from typing import Any

from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

RECORDED = 256


def record_collectives() -> None:
    """Have process groups that are made from here on record their last collectives."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))


def recorded() -> list[dict[str, Any]]:
    """The last collectives, oldest first; empty where none is recorded."""
    return json.loads(_dump_fr_trace_json(True, False)).get("entries", [])


def waits_in() -> tuple[str | None, float]:
    """The oldest collective that is not complete, if any, and for how many seconds."""
    open_ones = [entry for entry in recorded() if not entry["retired"]]
    if not open_ones:
        return None, 0.0
    return name_of(open_ones[0]), max(0.0, time.time() - open_ones[0]["time_created_ns"] / 1e9)


def newest_collective() -> str | None:
    """The last one that was called."""
    entries = recorded()
    return name_of(entries[-1]) if entries else None


def name_of(entry: dict[str, Any]) -> str:
    """'gloo:all_reduce of [3]', with the shapes that went in."""
    shapes = " ".join(str(shape) for shape in entry["input_sizes"][:2])
    return f"{entry['profiling_name']} of {shapes}"
