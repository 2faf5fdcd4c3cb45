"""Verify the checksum of a file once per day for all processes that read the file.

The first process hashes the file. It stores the hash, with the size, times and inode of the file,
in a small hidden file in the same directory. For one day, other processes trust the stored hash.
Then the file is hashed again, to detect corruption that changes neither size nor times.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from diffllm.core.errors import DataError
from diffllm.core.files import locked, read_text, replace_file

VALID_SECONDS = 24 * 3600
TICK = 0.05
"""Time resolution of file systems, in seconds."""


def matches(path: Path, sha256: str) -> bool:
    """Return whether the file `path` has the hexadecimal SHA-256 `sha256`.

    An unchanged file is hashed at most once a day. Raises OSError if the file is unreadable.
    """
    if is_marked(path, sha256):
        return True
    with contextlib.ExitStack() as stack:
        # In a read-only cache no lock can be created, so every process hashes the file.
        with contextlib.suppress(OSError):
            stack.enter_context(locked(mark_of(path).with_suffix(".lock")))
        # Another process may have hashed the file while this process waited for the lock.
        if is_marked(path, sha256):
            return True
        # Before reading, to detect concurrent changes.
        identity = settled_identity(path)
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != sha256:
            return False
        leave_mark(path, sha256, identity)
    return True


def leave_mark(path: Path, sha256: str, identity: str) -> None:
    # Without a mark, as in a read-only cache, the next process hashes the file again.
    with contextlib.suppress(OSError):
        replace_file(mark_of(path), f"{sha256} {identity}\n")


def mark_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.verified")


def is_marked(path: Path, sha256: str) -> bool:
    try:
        # Absolute, so that a mark with a time in the future also expires.
        age = abs(time.time() - mark_of(path).stat().st_mtime)
        marked = read_text(mark_of(path), 1000)
        return age < VALID_SECONDS and marked == f"{sha256} {identity_of(path)}\n"
    except (OSError, ValueError):
        return False


def identity_of(path: Path) -> str:
    return identity_in(path.stat())


def identity_in(stat: os.stat_result) -> str:
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def settled_identity(path: Path) -> str:
    """Return the size, times and inode of a file as one string.

    First wait until 50 ms after the last write to the file. File systems store times with a limited
    resolution, so two writes in quick succession may have the same time.
    """
    age = time.time() - path.stat().st_ctime
    # A time in the future, as on a network disk with another clock, must not cause a long wait.
    while 0 <= age < TICK:
        time.sleep(TICK - age)
        age = time.time() - path.stat().st_ctime
    return identity_of(path)


def again(directory: Path) -> str:
    return f"delete {directory} to prepare it again"


@contextlib.contextmanager
def usable(file: Path, directory: Path | None = None) -> Iterator[None]:
    """Raise DataError about `file` if the `with` block raises OSError or ValueError.

    If `directory` is given, the message recommends deleting that directory.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = f"; {again(directory)}" if directory else ""
        raise DataError(f"{file}: unusable ({reason}){advice}") from error
