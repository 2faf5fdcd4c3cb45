"""Locks between processes and nodes. The system releases the lock of a killed process."""

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from diffllm.core.errors import ConfigError, InUseError, printable
from diffllm.core.files.paths import why_no_file
from diffllm.core.files.reading import read_text

NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of flock on a file system without locks."""


def acquire(path: Path, wait: bool = True) -> FileLock:
    """Lock a file, which is created, until `release` or the end of this process.

    The content of the file names the process that holds the lock. Raises Timeout if another process
    holds the lock and `wait` is false, and OSError if the file cannot be opened or its file system
    has no flock.
    """
    if wrong := why_no_file(path):
        raise OSError(errno.EINVAL, f"its lock {wrong}", str(path))
    lock = FileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=sign)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except OSError as error:
        if error.errno in NO_FLOCK:
            raise OSError(error.errno, "its file system has no flock", str(path)) from None
        raise
    return lock


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file during the block; raises as `acquire`."""
    lock = acquire(path, wait)
    try:
        yield
    finally:
        lock.release()


def sign(descriptor: int) -> None:
    """Write the name of this process into the lock file that it holds."""
    with contextlib.suppress(OSError):  # a full disk; the lock does not depend on it
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())


def holder(path: Path) -> str:
    """Name the process that holds a lock, such as 'process 17 on node3', or 'another process'."""
    with contextlib.suppress(OSError, ValueError):
        return printable(read_text(path, most=1000)) or "another process"
    return "another process"


def hold(path: Path, kind: str, instead: str) -> FileLock:
    """Make a directory and keep other processes out of it until this one ends.

    Raises ConfigError, which calls it a `kind` such as "run directory", if another process is
    there, or if it cannot be written: then `instead` is the key to change.
    """
    made, lock = missing(path), path / ".lock"
    try:
        path.mkdir(parents=True, exist_ok=True)
        return acquire(lock, wait=False)
    except Timeout:
        raise InUseError(f"{kind} {path} is in use by {holder(lock)}") from None
    except OSError as error:
        for part in made:
            with contextlib.suppress(OSError):  # it was not made, or others use it by now
                part.unlink() if part == lock else part.rmdir()
        raise ConfigError(
            f"{kind} {path} cannot be written ({error.strerror}); choose {instead}"
        ) from error


def missing(path: Path) -> list[Path]:
    """List what making a directory makes, innermost first: itself, its parents, and its lock."""
    return [p for p in (path / ".lock", path, *path.parents) if not os.path.lexists(p)]


def take_back(path: Path, made: list[Path]) -> None:
    """Undo the making of a directory that was `missing` so, with all that lies in it; parents that
    others use by now stay."""
    for part in made:
        with contextlib.suppress(OSError):
            if part == path:
                shutil.rmtree(path)
            elif part in path.parents:
                part.rmdir()
            else:
                part.unlink()
