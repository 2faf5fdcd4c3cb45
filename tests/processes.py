"""Inspect processes and wait for events, also on a busy machine."""

import multiprocessing
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def call_together(function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """Return the results of `function(*args)` in `count` forked processes that begin together.

    Each process lives until all of them have called the function, so locks are held until then.
    """
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(count), context.Queue()

    def call() -> None:
        barrier.wait()
        try:
            results.put((True, function(*args)))
        except BaseException:
            results.put((False, traceback.format_exc()))
        barrier.wait()

    processes = [context.Process(target=call) for _ in range(count)]
    for process in processes:
        process.start()
    returned = [results.get(timeout=PATIENCE_S) for _ in processes]
    for process in processes:
        process.join(PATIENCE_S)
    failures = [text for succeeded, text in returned if not succeeded]
    assert not failures, "\n".join(failures)
    return [value for _, value in returned]
