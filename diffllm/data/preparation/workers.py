"""Processes that work through numbered parts, each part once.

A worker claims a part by a lock on a file, which the operating system releases when the worker
dies. So no two workers write one part at once, even if the parent of one of them was killed.
"""

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from filelock import Timeout

from diffllm.core.errors import DataError
from diffllm.core.files import locked

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that reach a whole process group: the parent decides what they mean."""
TEXT_BYTES, TOKENS, SIZE_DONE, PART = range(4)
NO_PART = -1
WAITING = -2
"""From here on down: a worker waits for a part that another process has claimed."""
TRACEBACK = 20_000
"""Characters of a traceback that are sent to the parent."""
TICK = 0.25
"""Seconds between two looks at the workers."""


class Meter:
    """Counts of one worker, which its parent reads."""

    def __init__(self, counts: Any, slot: int) -> None:
        self._counts, self._at = counts, 4 * slot

    def begin(self, part: int) -> None:
        self._counts[self._at + PART] = part

    def wait_for(self, part: int) -> None:
        self._counts[self._at + PART] = WAITING - part

    def rest(self) -> None:
        self._counts[self._at + PART] = NO_PART

    def add(self, text_bytes: int, tokens: int) -> None:
        self._counts[self._at + TEXT_BYTES] += text_bytes
        self._counts[self._at + TOKENS] += tokens

    def end(self, size: int) -> None:
        self._counts[self._at + SIZE_DONE] += size
        self.rest()


class Counts:
    """Counts of all workers together."""

    def __init__(self, processes: int) -> None:
        self._shared: Any = multiprocessing.get_context("fork").RawArray("q", 4 * processes)
        self.processes = processes
        self._shared[PART::4] = [NO_PART] * processes

    def meter(self, slot: int) -> Meter:
        return Meter(self._shared, slot)

    def total(self, what: int) -> int:
        return sum(self._shared[what::4])

    def current(self) -> list[int]:
        return [part for part in self._shared[PART::4] if part >= 0]

    def waiting(self) -> list[int]:
        return sorted({WAITING - part for part in self._shared[PART::4] if part <= WAITING})


def work_through(
    numbers: Sequence[int],
    do: Callable[[int, Meter], None],
    is_done: Callable[[int], bool],
    size_of: Callable[[int], int],
    claims: Path,
    counts: Counts,
    tick: Callable[[], None],
    names: Callable[[list[int]], str],
) -> None:
    """Do each number that is not done, in as many processes as are counted.

    Returns when all are done, those that others have claimed too. Raises what a worker raised,
    DataError for one that was killed; what is done stays.

    Args:
        claims: directory of the files by which parts are claimed.
        tick: is called every TICK seconds.
        names: says what numbers are, for messages.
    """
    context = multiprocessing.get_context("fork")
    workers: dict[int, tuple[Any, Connection]] = {}
    parent = os.getpid()

    def run(slot: int, errors: Connection) -> None:
        gc.freeze()  # or each collection looks through all that the parent has, which stays
        for ignored in IGNORED:
            signal.signal(ignored, signal.SIG_IGN)
        threading.Thread(target=leave_with, args=(parent,), daemon=True).start()
        meter = counts.meter(slot)
        try:
            for patient in (False, True):
                for number in numbers:
                    if is_done(number):
                        continue
                    if patient:
                        meter.wait_for(number)
                    try:
                        with locked(claim(claims, number), wait=patient):
                            if not is_done(number):
                                meter.begin(number)
                                do(number, meter)
                                meter.end(size_of(number))
                    except Timeout:
                        continue
                    meter.rest()
        except BaseException as error:
            errors.send(picklable(error))
            os._exit(1)
        os._exit(0)

    try:
        for slot in range(counts.processes):
            reading, writing = context.Pipe(duplex=False)
            process = context.Process(target=run, args=(slot, writing), daemon=True)
            process.start()
            writing.close()
            workers[process.sentinel] = process, reading
        while workers:
            readable = [errors for _, errors in workers.values()]
            for ready in wait([*workers, *readable], TICK):
                if isinstance(ready, Connection):  # before it ends: a pipe holds little
                    with suppress(EOFError):
                        raise ready.recv()
                elif ready in workers:
                    process, errors = workers.pop(ready)
                    process.join()
                    if process.exitcode:
                        with suppress(EOFError):  # it may have said why, and ended since
                            raise errors.recv()
                        raise DataError(killed(process.exitcode, names(counts.current())))
            tick()
    finally:
        for process, _ in workers.values():
            process.kill()
        for process, _ in workers.values():
            process.join()


def claim(directory: Path, number: int) -> Path:
    """Return the lock file that whoever works on a part holds."""
    return directory / f"part-{number:05d}.lock"


def killed(exitcode: int, names: str) -> str:
    """Say that a worker ended without a word."""
    how = f"was killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else "ended"
    memory = ", perhaps because memory ran out" * (exitcode == -signal.SIGKILL)
    return (
        f"a process of the preparation {how}{memory}, while these were read: {names}; the same "
        "command goes on where it was"
    )


def picklable(error: BaseException) -> BaseException:
    """Return an error as it may be sent to another process."""
    if isinstance(error, (DataError, OSError)):
        return error
    return RuntimeError("".join(traceback.format_exception(error))[-TRACEBACK:])


def leave_with(parent: int) -> None:
    """End this process when its parent is gone, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def available_cores() -> int:
    """Count the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
