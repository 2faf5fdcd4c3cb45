"""The collectives that this process has called, from torch's flight recorder."""

import json
import os
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from diffllm.core.torch_versions import FLIGHT_RECORDERS

RECORDED = 256
BACKGROUND: set[str] = set()
"""Names of groups in which a rank may wait long for a healthy one, as in saving a checkpoint."""


class RecordedCall(NamedTuple):
    """One collective that this process has called."""

    name: str
    """Operation and input shapes, as in 'gloo:all_reduce of [3]'."""
    group: str
    """Backend and name, as in 'gloo:0': each backend counts its own groups."""
    number: int
    """Position in the group's order of collectives, the same on every rank."""
    age_s: float


class Calls(NamedTuple):
    """The last collectives of this process."""

    newest: RecordedCall | None = None
    pending: RecordedCall | None = None
    """The oldest one that is not known to be complete; torch finds that out late."""
    numbers: dict[str, int] = {}  # noqa: RUF012
    """The number of the newest collective in each group."""


def record_collectives() -> None:
    """Make process groups that are created from here on record their last collectives."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))


def in_background(group: dist.ProcessGroup) -> None:
    """Exclude this group from hang detection."""
    BACKGROUND.add(group.group_name)


def recorded() -> Calls:
    """Return the last collectives of this process; callable from any thread."""
    entries = [
        e for dump in FLIGHT_RECORDERS for e in json.loads(dump(True, False)).get("entries", [])
    ]
    entries = [e for e in entries if not e["is_p2p"] and e["process_group"][0] not in BACKGROUND]
    if not entries:
        return Calls()
    entries.sort(key=lambda entry: entry["time_created_ns"])
    open_ones = [entry for entry in entries if not entry["retired"]]
    numbers = {group_of(entry): entry["collective_seq_id"] for entry in entries}
    return Calls(call(entries[-1]), call(open_ones[0]) if open_ones else None, numbers)


def group_of(entry: dict[str, Any]) -> str:
    """Return backend and name of an entry's process group."""
    return f"{entry['profiling_name'].partition(':')[0]}:{entry['process_group'][0]}"


def call(entry: dict[str, Any]) -> RecordedCall:
    """Read one entry of the recorder."""
    shapes = " ".join(str(shape) for shape in entry["input_sizes"][:2])
    return RecordedCall(
        f"{entry['profiling_name']} of {shapes}",
        group_of(entry),
        entry["collective_seq_id"],
        max(0.0, time.time() - entry["time_created_ns"] / 1e9),
    )
