"""Handle failed writes to stdout or stderr, for example to a closed stream or a full disk.

A training run ignores failed writes. A command that prints a result reports a failed write.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from diffllm.core.errors import UserError


class ReaderGone(Exception):
    """Raised if the process that reads standard output, such as `head`, has exited."""


class Unfailing:
    """Text stream wrapper that ignores write errors, and escapes characters it cannot encode."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            try:
                self.stream.write(text)
            except UnicodeError:
                encoding = getattr(self.stream, "encoding", None) or "ascii"
                escaped = text.encode(encoding, "backslashreplace")
                self.stream.write(escaped.decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._failed(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Ignore the error of a failed write or flush. A subclass can raise an exception."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Result(Unfailing):
    """Wrapper of standard output that raises an exception if a write fails.

    The exception is ReaderGone if the process that reads standard output, such as `head`, has
    exited. For all other failures it is UserError.
    """

    def _failed(self, error: Exception) -> None:
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from error
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot write to standard output: {reason}; check the file that receives the output"
        ) from error


def open_closed_descriptors() -> None:
    """Open /dev/null on each of the file descriptors 0, 1 and 2 that is closed.

    Otherwise the next opened file would become standard input, output or error.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The system returns the lowest free number, which is `number`.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)


def read_only_stream() -> TextIO:
    """Open a text stream to which every write fails."""
    return open(os.devnull, encoding="utf-8")


def never_fail() -> None:
    """Replace stdout and stderr by streams that never raise, not even in the flush at exit."""
    sys.stdout, sys.stderr = (
        # A stream that was closed before the start is None.
        stream if type(stream) is Unfailing else Unfailing(stream or read_only_stream())
        for stream in (sys.stdout, sys.stderr)
    )


@contextlib.contextmanager
def unfailing() -> Iterator[None]:
    """Context manager in which writes to stdout and stderr never raise."""
    streams = sys.stdout, sys.stderr
    never_fail()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


@contextlib.contextmanager
def messages_on_stderr(redirect: bool) -> Iterator[None]:
    """Context manager in which stdout of this process and of its children is stderr.

    Do nothing if `redirect` is false. A command with --json prints its only value afterwards.
    """
    if not redirect:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    # Child processes and C libraries write to the descriptor, not to sys.stdout.
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@contextlib.contextmanager
def result() -> Iterator[None]:
    """Context manager that raises UserError if a write to stdout inside the context fails.

    If the process that reads stdout, such as `head`, has exited, the next write ends the context
    without an error. After the context, failed writes are ignored.
    """
    never_fail()
    stdout = getattr(sys.stdout, "stream", sys.stdout)
    sys.stdout = Result(stdout)
    try:
        try:
            yield
        except SystemExit:
            # Buffered output may still fail, which counts more than the exit code.
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except ReaderGone:
        pass
    finally:
        sys.stdout = stdout
        never_fail()
