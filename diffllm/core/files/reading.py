"""Reading untrusted files: regular files of bounded size, JSON, and dataclasses made of JSON.

A run's own files are never symbolic links; a file that a user names may be one.
"""

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_args, get_origin

from diffllm.core.errors import CheckpointError

T = TypeVar("T")

LARGEST_JSON = 64 * 2**20
"""Limit in bytes; the manifest of 100,000 parameters and 10,000 ranks has a tenth of it."""
LARGEST_LINES = 4 * 2**30
"""Limit in bytes of a file that is read line by line."""
LONGEST_LINE = 16 * 2**20
DEEPEST = 64
"""Levels of lists and objects inside each other."""
TYPES = {str: "text", float: "a number", int: "a whole number", bool: "true or false"}


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


def read_typed(file: Path, cls: type[T], follow: bool = False) -> T:
    """Read a regular file of JSON as a dataclass; keys that it has no field for are ignored.

    Raises OSError, or ValueError whose message continues the file's name.

    Args:
        follow: whether the file may be a symbolic link.
    """
    content = read_json(file, follow=follow)
    try:
        return made(cls, content)
    except ValueError as error:
        raise ValueError(f"is damaged: {error}") from None


def made(
    cls: type[T],
    content: Any,
    where: str = "",
    unknown: Callable[[str, list[str]], str] | None = None,
    omit: tuple[str, ...] = (),
) -> T:
    """Make a dataclass of a mapping; raises ValueError that names the key and what it must be.

    Args:
        where: key of `content`, for messages.
        unknown: takes an unknown key and the known ones, and returns a hint for the message; None
            ignores unknown keys.
        omit: fields that `content` must not set.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{where or 'its content'} must be a mapping of keys to values")
    known = {f.name: f for f in fields(cls) if f.name not in omit}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for key in content:
        if key not in known and unknown:
            hint = unknown(f"{prefix}{key}", [f"{prefix}{name}" for name in known])
            raise ValueError(f"unknown key {prefix}{key}{hint}")
    missing = [
        f"{prefix}{name}"
        for name, f in known.items()
        if name not in content and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing")
    values = {
        name: typed(content[name], f.type, f"{prefix}{name}", unknown)
        for name, f in known.items()
        if name in content
    }
    return cls(**values)


def typed(
    value: Any, kind: Any, where: str, unknown: Callable[[str, list[str]], str] | None = None
) -> Any:
    """Return a value as a field's type; raises ValueError for another type.

    Supports dataclasses, list[T], dict[str, T], T | None, text, booleans, finite numbers and whole
    numbers of 64 bits.
    """
    if None in (allowed := get_args(kind) or (kind,)) or type(None) in allowed:
        if value is None:
            return None
        (kind,) = (k for k in allowed if k is not type(None))
    if is_dataclass(kind):
        return made(kind, value, where, unknown)  # type: ignore[arg-type]
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise ValueError(f"{where}={value} must be a list")
        (inner,) = get_args(kind)
        return [typed(item, inner, f"{where}[{i}]", unknown) for i, item in enumerate(value)]
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where}={value} must be a mapping of names to values")
        _, inner = get_args(kind)
        return {str(k): typed(v, inner, f"{where}.{k}", unknown) for k, v in value.items()}
    if kind is float and isinstance(value, str):
        with suppress(ValueError):  # YAML 1.1 reads 1e-3 as text
            value = float(value)
    right = isinstance(value, (int, float) if kind is float else kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}={value!r} must be {TYPES[kind]}")
    if kind is float and not abs(value) <= sys.float_info.max:
        raise ValueError(f"{where}={value} must be a finite number")
    if kind is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{where}={value} must be a whole number of 64 bits")
    return kind(value)
