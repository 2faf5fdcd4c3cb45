"""Which collectives this process has called, from torch's flight recorder."""

import json
import os
import time
from typing import Any, NamedTuple

from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

RECORDED = 256


class Call(NamedTuple):
    """One collective."""

    name: str
    """'gloo:all_reduce of [3]', with the shapes that went in."""
    group: str
    number: int
    """Its place in the group's order, the same on every rank."""
    age_s: float


class Calls(NamedTuple):
    """The last collectives of this process."""

    newest: Call | None = None
    pending: Call | None = None
    """The oldest one that is not known to be complete; torch finds that out late."""
    numbers: dict[str, int] = {}  # noqa: RUF012
    """The newest number in each group."""


def record_collectives() -> None:
    """Have process groups that are made from here on record their last collectives."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))


def recorded() -> Calls:
    """What has been called so far; callable from any thread."""
    entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
    if not entries:
        return Calls()
    open_ones = [entry for entry in entries if not entry["retired"]]
    numbers = {e["process_group"][0]: e["collective_seq_id"] for e in entries if not e["is_p2p"]}
    return Calls(call(entries[-1]), call(open_ones[0]) if open_ones else None, numbers)


def call(entry: dict[str, Any]) -> Call:
    """One entry of the recorder."""
    shapes = " ".join(str(shape) for shape in entry["input_sizes"][:2])
    return Call(
        f"{entry['profiling_name']} of {shapes}",
        entry["process_group"][0],
        entry["collective_seq_id"],
        max(0.0, time.time() - entry["time_created_ns"] / 1e9),
    )
