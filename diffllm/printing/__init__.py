"""Printing of text that may come from foreign files, such as studies, examples and checkpoints."""

import json
import sys
from typing import Any, TextIO

from diffllm.errors import printable

KEPT = "\n\t\u00a0\u3000\u200c\u200d"
"""Unprintable characters that are printed: line breaks, tabs, and the spaces and joiners of written
languages."""


def echo(
    text: object = "", end: str = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print a text, to stdout by default, with unprintable characters escaped."""
    print(printable(str(text), KEPT), end=end, file=file, flush=flush)


def echo_json(content: Any) -> None:
    """Print JSON to stdout; JSON has its own escapes."""
    print(json.dumps(content, indent=2))


def to_stderr(text: str) -> None:
    """Print a message as one line on stderr."""
    echo(" ".join(line.strip() for line in text.splitlines()), file=sys.stderr, flush=True)
