"""A rich console for text that may come from foreign files."""

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from diffllm.errors import printable
from diffllm.printing import KEPT


class Console(rich.console.Console):
    """A rich console that escapes unprintable characters and prints no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """Render as rich does, with the text of each segment escaped."""
        for segment in super().render(*args, **options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, KEPT), segment.style)
