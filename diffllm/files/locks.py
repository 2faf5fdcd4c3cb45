"""Locks between processes and nodes. The system releases the lock of a killed process."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
import weakref
from pathlib import Path

from diffllm.errors import ConfigError, InUseError

MISSING = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of flock on a file system without locks."""
POLL_S = 0.05


class Held(Exception):
    """Another process holds the lock."""


class Lock:
    """An flock on a file, which is created. It ends with `release` or with the process.

    A shared file system must support flock (Lustre: mount option `flock`).
    """

    def __init__(self, path: Path):
        self.path = path
        self.descriptor: int | None = None
        self.made = False
        """Whether this lock created the file."""
        LOCKS.add(self)

    def acquire(self, wait: bool = True) -> None:
        """Acquire the lock.

        Raises Held if another process has it and `wait` is false, and OSError if the file cannot be
        created or the file system has no locks.
        """
        while not self._taken():
            if not wait:
                raise Held
            time.sleep(POLL_S)

    def _taken(self) -> bool:
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = same_file(descriptor, self.path)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if self.made:
                self.path.unlink()
            if error.errno in MISSING:
                raise OSError(error.errno, "its file system has no flock", str(self.path)) from None
            raise
        if there:  # otherwise its holder has removed the file, and another file has the name
            self.descriptor = descriptor
        else:
            os.close(descriptor)
        return there

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            self.made = True
        except FileExistsError:
            descriptor = os.open(self.path, flags | os.O_CREAT, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "its lock is not a regular file", str(self.path))
        return descriptor

    def release(self, remove: bool = False) -> None:
        """Release the lock if it is held.

        Args:
            remove: also remove the file if this lock created it.
        """
        if self.descriptor is None:
            return
        if remove and self.made:
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self.descriptor)
        self.descriptor = None

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


LOCKS: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def forget_in_child() -> None:
    """Close the locks of the parent process in a forked child, which may outlive the parent."""
    for lock in list(LOCKS):
        lock.release()  # the parent's descriptor stays open and locked


os.register_at_fork(after_in_child=forget_in_child)


def same_file(descriptor: int, path: Path) -> bool:
    """Whether `path` names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def hold(path: Path, kind: str, instead: str) -> Lock:
    """Make a directory and keep other processes out of it until this one ends.

    Raises ConfigError, which calls it a `kind` such as "run directory", if another process is
    there, or if it cannot be written: then `instead` is the key to change.
    """
    made, lock = missing(path), Lock(path / ".lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(wait=False)
    except Held:
        raise InUseError(f"{kind} {path} is in use by another process") from None
    except OSError as error:
        for part in made:
            with contextlib.suppress(OSError):  # it was not made, or others use it by now
                part.rmdir()
        raise ConfigError(
            f"{kind} {path} cannot be written ({error.strerror}); choose {instead}"
        ) from error
    return lock


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
