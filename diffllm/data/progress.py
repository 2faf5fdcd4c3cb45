"""Lines and bars about what takes long, on stderr."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

PATIENCE = 15.0
"""Seconds after which it is said what is waited for."""


def print_line(message: str) -> None:
    """Print one line to stderr."""
    Console(stderr=True, highlight=False).print(message, markup=False, soft_wrap=True)


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
def track(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress on a terminal and nothing elsewhere; yields `advance(steps)`."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda steps: progress.advance(task, steps)
