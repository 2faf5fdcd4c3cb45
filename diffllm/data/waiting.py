"""Waiting for others, which is said when it takes long."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from diffllm.data.progress import print_line

PATIENCE = 15.0
"""Seconds after which it is said what is waited for."""


@contextmanager
def said_if_long(what: str) -> Iterator[None]:
    """Print what is waited for, if that takes longer than PATIENCE, and again as often."""
    over = threading.Event()

    def say() -> None:
        started = time.monotonic()
        while not over.wait(PATIENCE):
            print_line(f"waiting for {what}, for {time.monotonic() - started:.0f} s now")

    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()


@contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold a lock; where another process has it for long, say what that does."""
    lock = FileLock(path)
    with said_if_long(f"another process that {what}"):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
