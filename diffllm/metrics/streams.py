"""Standard output and standard error that fail: what that means to a run, and to a command whose
result is what it prints."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from diffllm.core.errors import UserError


class ReaderGone(Exception):
    """The reader of standard output, such as `head`, has had enough."""


class Closed(io.TextIOBase):
    """In place of a standard stream that was closed before the start."""

    def write(self, text: str) -> int:
        """Raise OSError."""
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


class Unfailing:
    """A text stream that never raises: what it cannot write, for want of room, of a reader or of a
    terminal, is lost."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        """Write; characters that the stream's encoding lacks become escapes."""
        try:
            self.stream.write(text)
        except UnicodeError:
            self._attempt(lambda: self.stream.write(escaped(text, self.stream)))
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._failed(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except (OSError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Go on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Result(Unfailing):
    """Standard output of a command whose result it is: raises ReaderGone, and UserError where it
    cannot be written for another reason."""

    def _failed(self, error: Exception) -> None:
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from error
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"standard output cannot be written: {reason}") from error


def escaped(text: str, stream: Any) -> str:
    """Return a text in the characters of a stream's encoding, others as escapes."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def open_closed_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, or the next file would get the number, and with it
    what libraries say."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(opened, True)


def never_fail() -> None:
    """Have nothing that this process says end it, its last flush included."""
    sys.stdout, sys.stderr = (
        stream if type(stream) is Unfailing else Unfailing(stream or Closed())
        for stream in (sys.stdout, sys.stderr)
    )


@contextlib.contextmanager
def unfailing() -> Iterator[None]:
    """A context in which nothing that is said ends a run; the streams before it come back."""
    given = sys.stdout, sys.stderr
    never_fail()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = given


@contextlib.contextmanager
def result() -> Iterator[None]:
    """A context for a command whose result is its output.

    It ends quietly where the reader has had enough, and raises UserError where the output cannot be
    written otherwise. Behind it nothing that is said fails.
    """
    never_fail()
    given = getattr(sys.stdout, "stream", sys.stdout)
    sys.stdout = Result(given)
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except ReaderGone:
        pass
    finally:
        sys.stdout = given
        never_fail()
