"""Lines and bars about what takes long, on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import Progress

from diffllm.core.console import Console
from diffllm.core.errors import printable


@contextmanager
def track(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress on a terminal and nothing elsewhere; yields `advance(steps)`."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(printable(description)), total=total)
        yield lambda steps: progress.advance(task, steps)
