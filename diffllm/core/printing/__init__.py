"""Printing of text that may come from foreign files, such as studies, examples and checkpoints."""

import json
import sys
from typing import Any, TextIO

from diffllm.core.errors import printable

SPACES = "\u00a0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
JOINERS = "\u00ad\u200b\u200c\u200d\u2060" + "".join(map(chr, range(0xE0020, 0xE0080)))
KEPT = f"\n\t{SPACES}{JOINERS}"
"""Characters that Python calls unprintable and that terminals only display: line breaks, tabs, and
the spaces, joiners and tags of written languages."""


def echo(
    text: object = "", end: str = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print a text, to stdout by default, with unprintable characters escaped."""
    print(printable(str(text).replace("\r\n", "\n"), KEPT), end=end, file=file, flush=flush)


def echo_json(content: Any, allow_nan: bool = True) -> None:
    """Print JSON to stdout; JSON has its own escapes."""
    print(json.dumps(content, indent=2, allow_nan=allow_nan))


def to_stderr(text: str) -> None:
    """Print a message as one line on stderr."""
    echo(" ".join(line.strip() for line in text.splitlines()), file=sys.stderr, flush=True)
