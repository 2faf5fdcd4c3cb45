"""Inspect processes and wait for events, also on a busy machine."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 240
"""Longest wait for an event, much longer than needed on a busy machine."""


def state_of(pid: int) -> str:
    """Return the state letter of a process as in /proc/PID/stat, "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):  # ends between open and read
        return ""


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not waited for it."""
    return state_of(pid) in ("", "Z", "X")


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll until `condition()` is true; fail after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.005)
