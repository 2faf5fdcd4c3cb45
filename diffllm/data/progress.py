"""Progress bars, status lines and messages about waiting for a lock, on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout
from rich.markup import escape
from rich.progress import Progress

from diffllm.core.console import Console
from diffllm.core.errors import printable
from diffllm.core.files import acquire, holder
from diffllm.core.printing import to_stderr


@contextmanager
def track(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, and yield a function that advances the bar.

    If stderr is not a terminal, nothing is shown.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(printable(description)), total=total)
        yield lambda steps: progress.advance(task, steps)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the name of the current stage on stderr.

    On a terminal, each name replaces the previous name; otherwise each name is a new line.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield to_stderr
        return
    with console.status("") as status:
        yield lambda text: status.update(escape(printable(text)))


@contextmanager
def held(path: Path, activity: str) -> Iterator[None]:
    # The first attempt does not wait, so that a message can name the process that holds the lock.
    try:
        lock = acquire(path, wait=False)
    except Timeout:
        to_stderr(f"waiting for {holder(path)}, which {activity}")
        lock = acquire(path)
    try:
        yield
    finally:
        lock.release()
