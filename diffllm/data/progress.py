"""Progress bars, and messages about long waits, on stderr."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape
from rich.progress import Progress

from diffllm.core.console import Console
from diffllm.core.errors import printable
from diffllm.core.files import acquire, holder
from diffllm.core.printing import to_stderr

PATIENCE = 15.0
"""Seconds between two messages about a wait."""


@contextmanager
def track(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress on a terminal and nothing elsewhere; yields `advance(steps)`."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(printable(description)), total=total)
        yield lambda steps: progress.advance(task, steps)


@contextmanager
def said_if_long(what: str | Callable[[], str]) -> Iterator[None]:
    """Print every PATIENCE seconds what the block waits for.

    Args:
        what: in words, or a function that returns them.
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
    """Hold a lock; while another process has it for long, print which one and `what` it does."""
    with said_if_long(lambda: f"{holder(path)} that {what}"):
        lock = acquire(path)
    try:
        yield
    finally:
        lock.release()
