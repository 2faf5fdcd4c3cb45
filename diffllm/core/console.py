"""A console, progress bars and status lines, based on the package `rich`.

Unprintable characters are escaped, because a text may come from an untrusted file.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.console
from rich.markup import escape
from rich.progress import Progress
from rich.text import Text

from diffllm.core.errors import printable
from diffllm.core.printing import KEPT, to_stderr


class Console(rich.console.Console):
    """A rich console that escapes unprintable characters and does not interpret markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, KEPT), **options)


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
