"""The log of a run: the lines that its screen shows, in a file."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffllm.core.files import open_to_append


class RunLog:
    """Lines that go to a file once one is opened, and wait in memory until then.

    A run that is refused opens none. That the file cannot be written is no failure of the run.
    """

    def __init__(self) -> None:
        self.waiting = ""
        self.descriptor: int | None = None
        self.stderr: Any = None

    def copy_stderr(self, errors_only: bool = False) -> None:
        """Have what goes to standard error logged as well, or only the errors, until `close`."""
        self.stderr = sys.stderr
        sys.stderr = Copied(sys.stderr, self.write_error if errors_only else self.write)

    def open(self, file: Path) -> None:
        """Append to this file what was written so far, and what comes."""
        with contextlib.suppress(OSError):
            self.descriptor = open_to_append(file)
        text, self.waiting = self.waiting, ""
        self.write(text)

    def write(self, text: str) -> None:
        """Log a text; line breaks are its own."""
        if self.descriptor is None:
            self.waiting += text
            return
        with contextlib.suppress(OSError):
            os.write(self.descriptor, text.encode(errors="replace"))

    def write_error(self, text: str) -> None:
        """Log a text if it is an error's."""
        if text.startswith("error: "):
            self.write(f"{text}\n")

    def close(self) -> None:
        """End the log; standard error is what it was before."""
        if self.stderr is not None:
            sys.stderr, self.stderr = self.stderr, None
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Copied:
    """A stream whose text is handed on; what only moves the cursor of a terminal is not."""

    def __init__(self, stream: Any, copy: Callable[[str], None]):
        self.stream, self.copy = stream, copy

    def write(self, text: str) -> int:
        """Write to the stream, and hand the text on."""
        written: int = self.stream.write(text)
        if "\x1b" not in text and "\r" not in text:
            self.copy(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
