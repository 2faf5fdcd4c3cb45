"""Waiting for others, which is said when it takes long."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from diffllm.errors import printable
from diffllm.files import read_text, replace_file
from diffllm.printing import to_stderr

PATIENCE = 15.0
"""Seconds after which it is said what is waited for."""


@contextmanager
def said_if_long(what: str | Callable[[], str]) -> Iterator[None]:
    """Print what is waited for, if that takes longer than PATIENCE, and again as often.

    Args:
        what: in words, or what is asked for them each time.
    """
    over = threading.Event()

    def say() -> None:
        started = time.monotonic()
        while not over.wait(PATIENCE):
            words = what if isinstance(what, str) else what()
            to_stderr(f"waiting for {words}, for {time.monotonic() - started:.0f} s now")

    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()


@contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold a lock; where another process has it for long, say which one, and what that does."""
    lock = FileLock(path)
    with said_if_long(lambda: f"{holder(path)} that {what}"):
        lock.acquire()
    note = note_of(path)
    with suppress(OSError):  # it is only for the eyes of those who wait
        replace_file(note, f"process {os.getpid()} on {socket.gethostname()}")
    try:
        yield
    finally:
        with suppress(OSError):
            note.unlink()
        lock.release()


def note_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.holder")


def holder(path: Path) -> str:
    """Name the process that has a lock, such as 'process 17 on node3', or 'another process'."""
    with suppress(OSError, ValueError):
        return printable(read_text(note_of(path), most=1000))
    return "another process"
