"""Reading files that may come from anywhere: of bounded size, and none but regular ones.

A run's own files are no symbolic links; one that a user names may be one.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from diffllm.core.errors import CheckpointError

LARGEST_JSON = 64 * 2**20
"""Limit in bytes; the manifest of 100,000 parameters and 10,000 ranks has a tenth of it."""
LARGEST_LINES = 4 * 2**30
"""Limit in bytes of a file that is read line by line."""
LONGEST_LINE = 16 * 2**20
DEEPEST = 64
"""Levels of lists and objects inside each other."""


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn a reader's complaint about a run's file into a CheckpointError that names the file."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{file} {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def open_regular(file: Path, most: int, follow: bool = False) -> BinaryIO:
    """Open a regular file to read it, without waiting, as at a pipe.

    Raises OSError, or ValueError with words that follow the file's name.

    Args:
        most: bytes that it may have.
        follow: whether it may be a symbolic link.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise ValueError("is not a regular file but a symbolic link") from error
        if error.errno == errno.ENXIO:
            raise ValueError("is not a regular file") from error
        raise
    about = os.fstat(descriptor)
    wrong = ""
    if not stat.S_ISREG(about.st_mode):
        wrong = "is not a regular file"
    elif about.st_size > most:
        wrong = f"has {about.st_size:,} bytes, more than {most:,}"
    if wrong:
        os.close(descriptor)
        raise ValueError(wrong)
    return os.fdopen(descriptor, "rb")


def read_bytes(file: Path, most: int = LARGEST_JSON, follow: bool = False) -> bytes:
    """Read a regular file; raises as `open_regular`."""
    with open_regular(file, most, follow) as stream:
        return stream.read(most)


def read_text(file: Path, most: int = LARGEST_JSON, follow: bool = False) -> str:
    """Read a regular file of UTF-8; raises as `open_regular`."""
    try:
        return read_bytes(file, most, follow).decode()
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None


def read_lines(file: Path) -> Iterator[str]:
    """Iterate over a file's lines, with their ends, as text; of a line beyond all reason, parts.

    What is no UTF-8 becomes a replacement character. Raises as `open_regular`.
    """
    with open_regular(file, LARGEST_LINES) as stream:
        while line := stream.readline(LONGEST_LINE):
            yield line.decode(errors="replace")


def read_json(file: Path, most: int = LARGEST_JSON, follow: bool = False) -> dict[str, Any]:
    """Read a regular file with a JSON object of plain values; raises as `open_regular`."""
    content = parse_json(read_text(file, most, follow))
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    return content


def parse_json(text: str) -> Any:
    """Parse JSON of plain values: of moderate depth, numbers within 64 bits, text that UTF-8 can
    hold. Raises ValueError with words that follow a file's name."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    check_plain(content)
    return content


def check_plain(value: Any, depth: int = DEEPEST) -> None:
    """Raise ValueError for what the code behind a reader could not handle."""
    if isinstance(value, dict):
        for key in value:
            check_plain(key)
    if isinstance(value, dict | list):
        if not depth:
            raise ValueError("is nested too deeply")
        for inner in value.values() if isinstance(value, dict) else value:
            check_plain(inner, depth - 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("holds a number beyond 64 bits")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair, which is no text") from None
