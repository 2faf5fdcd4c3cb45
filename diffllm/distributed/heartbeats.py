"""Heartbeats of ranks, and the explanation of why ranks wait."""

from typing import NamedTuple

from diffllm.distributed.world import Calls

DEFAULT_GROUPS = ("gloo:0", "nccl:0")
GONE = "killed, stopped or disconnected"


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
    left: bool
    """Whether the rank has finished or failed."""
    words: str
    """Error message of a failed rank, else ""."""


def not_called(beats: dict[int, Beat], beat: Beat) -> list[int]:
    """Return the ranks that have not called the pending collective of the heartbeat `beat`.

    `beats` maps each rank to its last heartbeat. Return [] if `beat` has no pending collective.
    """
    if not beat.calls.pending:
        return []
    group, number = beat.calls.group, beat.calls.number
    # Every rank belongs to the default group, but perhaps not to another group.
    unknown = 0 if group in DEFAULT_GROUPS else 10**18
    return [r for r, b in dict(beats).items() if b.calls.newest.get(group, unknown) < number]


def diagnosis(beats: dict[int, Beat], silent: list[int]) -> str:
    """Return one line that explains why ranks wait; "" if no rank is missing or has failed.

    The line names missing or failed ranks, and up to 3 waiting ranks with their collectives.

    Args:
        beats: last heartbeat of each rank.
        silent: ranks without a recent heartbeat.
    """
    waited_for = {rank for beat in beats.values() for rank in not_called(beats, beat)}
    culprits = (
        {r: f"rank {r} failed at {b.place}: {b.words}" for r, b in beats.items() if b.words}
        or {r: missing_text(r, beats.get(r)) for r in silent}
        or {r: f"rank {r} is missing: it hangs at {beats[r].place}" for r in sorted(waited_for)}
    )
    waiting = [
        f"rank {rank} waits at {beat.place} in {beat.calls.name}"
        for rank, beat in sorted(beats.items())
        if rank not in culprits and beat.calls.name and not beat.left
    ]
    return "; ".join([*culprits.values(), *waiting[:3]]) if culprits else ""


def missing_text(rank: int, beat: Beat | None) -> str:
    if beat is None:
        return f"rank {rank} is missing: it never sent a heartbeat"
    last = f"its last heartbeat came from {beat.place}"
    return f"rank {rank} is missing: {GONE}; {last}"
