"""Waiting for others, which is said when it takes long."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diffllm.core.files import acquire, holder
from diffllm.core.printing import to_stderr

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
    with said_if_long(lambda: f"{holder(path)} that {what}"):
        lock = acquire(path)
    try:
        yield
    finally:
        lock.release()
