"""A console, based on the package `rich`, for text that may come from untrusted files."""

from typing import Any

import rich.console
from rich.text import Text

from diffllm.core.errors import printable
from diffllm.core.printing import KEPT


class Console(rich.console.Console):
    """A rich console that escapes unprintable characters and does not interpret markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, KEPT), **options)
