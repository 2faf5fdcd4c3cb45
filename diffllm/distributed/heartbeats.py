"""Heartbeats of ranks, and the explanation of why ranks wait."""

import contextlib
import multiprocessing
from pathlib import Path
from typing import NamedTuple

from diffllm.distributed.world import Calls

DEFAULT_GROUPS = ("gloo:0", "nccl:0")
LOST = "killed, stopped or disconnected"


class Beat(NamedTuple):
    """A heartbeat of one rank."""

    number: int
    """Index of the heartbeat, from 0; -1 for the last heartbeat."""
    place: str
    """Current activity, such as "step 7"."""
    place_s: float
    """Seconds since the current activity began."""
    calls: Calls
    stopping: bool
    """Whether the rank has received a stop signal."""
    has_left: bool
    """Whether the rank has finished or failed."""
    words: str
    """Error message of a failed rank, else ""."""


def not_called(beats: dict[int, Beat], beat: Beat) -> list[int]:
    """Return the ranks that have not called the pending collective of the heartbeat `beat`.

    `beats` maps each rank to its last heartbeat. Return [] if `beat` has no pending collective.
    """
    if not beat.calls.pending:
        return []
    group = beat.calls.group
    number = beat.calls.number
    # Every rank belongs to the default group, but perhaps not to another group.
    unknown = 0 if group in DEFAULT_GROUPS else 10**18
    late_ranks = []
    for rank, other in dict(beats).items():  # A copy: another thread adds heartbeats.
        if other.calls.newest.get(group, unknown) < number:
            late_ranks.append(rank)
    return late_ranks


def diagnosis(beats: dict[int, Beat], silent: list[int]) -> str:
    """Return one line that explains why ranks wait; "" if no rank is missing or has failed.

    The line names missing or failed ranks, and up to 3 waiting ranks with their collectives.

    Args:
        beats: last heartbeat of each rank.
        silent: ranks without a recent heartbeat.
    """
    culprits: dict[int, str] = {}
    for rank, beat in beats.items():
        if beat.words:
            culprits[rank] = f"rank {rank} failed at {beat.place}: {beat.words}"
    # A failed rank explains why other ranks are silent, and a silent rank why others hang.
    if not culprits:
        culprits = {rank: missing_text(rank, beats.get(rank)) for rank in silent}
    if not culprits:
        late_ranks: set[int] = set()
        for beat in beats.values():
            late_ranks.update(not_called(beats, beat))
        for rank in sorted(late_ranks):
            culprits[rank] = f"rank {rank} is missing: it hangs at {beats[rank].place}"
    if not culprits:
        return ""
    waiting = []
    for rank, beat in sorted(beats.items()):
        if rank not in culprits and beat.calls.name and not beat.has_left:
            waiting.append(f"rank {rank} waits at {beat.place} in {beat.calls.name}")
    return "; ".join([*culprits.values(), *waiting[:3]])


def missing_text(rank: int, beat: Beat | None) -> str:
    if beat is None:
        return f"rank {rank} is missing: it never sent a heartbeat"
    last = f"its last heartbeat came from {beat.place}"
    return f"rank {rank} is missing: {LOST}; {last}"


def stopped_children() -> list[str]:
    """Return the process ids of stopped child processes, such as workers of the data loader."""
    stopped = []
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, IndexError):
            # The state follows the command in brackets, which may contain any bytes.
            stat = Path(f"/proc/{child.pid}/stat").read_bytes()
            state = stat.rpartition(b")")[2].split()[0]
            if state in b"Tt":
                stopped.append(str(child.pid))
    return stopped
