"""Looking at processes and waiting for events, however busy the machine is."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 240
"""Nothing that a test waits for takes so long, however busy the machine."""


def state_of(pid: int) -> str:
    """Return the state letter of a process as in /proc/PID/stat, "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
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
