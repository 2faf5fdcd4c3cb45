"""Locks between processes and nodes that end with the process that holds them."""

import atexit
import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import sys
import threading
import time
import weakref
from pathlib import Path

from diffllm.errors import ConfigError, InUseError

MISSING = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of a file system that has no locks."""
POLL_S = 0.05
BEAT_S = 5.0
"""Seconds between two beats of a process that holds a lock on such a file system."""
SILENT_S = 60.0
"""Seconds without a beat after which that process is gone."""


class Held(Exception):
    """Another process holds the lock."""


class Lock:
    """A lock on the name of a file, which is made; held until `release`, or the process ends.

    By flock, which the system gives up for a process that was killed. A file system without it,
    as Lustre is mounted on some clusters, has a second file beside the first, into which the holder
    writes every few seconds: that of a process which is silent for long is taken over.
    """

    def __init__(self, path: Path):
        self.path = path
        self.descriptor: int | None = None
        self.beats: Beats | None = None
        self.made = False
        """Whether the file was not there before."""
        LOCKS.add(self)

    def acquire(self, wait: bool = True) -> None:
        """Take the lock; raises Held if another process has it and this one is not to wait, and
        OSError where the file cannot be made."""
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
            if error.errno in MISSING:
                self.beats = Beats.begin(self.path.with_name(f"{self.path.name}.held"))
                return self.beats is not None
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        if there:  # else its holder has removed it, and the name is another file's
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
        """Give the lock back, if it is held.

        Args:
            remove: the file goes, too, if this lock has made it.
        """
        if remove and self.made and (self.descriptor is not None or self.beats):
            with contextlib.suppress(OSError):
                self.path.unlink()
        if self.descriptor is not None:
            os.close(self.descriptor)
        if self.beats:
            self.beats.end()
        self.descriptor = self.beats = None

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


LOCKS: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def forget_in_child() -> None:
    """Leave the locks of a process to it, in a child that was forked: the child may outlive it."""
    for lock in list(LOCKS):
        if lock.descriptor is not None:
            os.close(lock.descriptor)  # the parent's own stays open, and locked
        lock.descriptor = lock.beats = None


os.register_at_fork(after_in_child=forget_in_child)


class Beats:
    """A file that its process writes into every few seconds, so that others see it alive."""

    def __init__(self, path: Path, name: str):
        self.path, self.name, self.process = path, name, os.getpid()
        self.over = threading.Event()
        # On a thread that does not know this object: it ends with whoever holds the lock.
        args = (path, name, self.over)
        threading.Thread(target=beat, args=args, daemon=True).start()
        atexit.register(self.end)

    @classmethod
    def begin(cls, path: Path) -> "Beats | None":
        """Make the file, or take over that of a process which is silent; None if one is alive."""
        name = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
        if written_first(path, name):
            return cls(path, name)
        last = content_of(path)
        if not silent(path, last):
            return None
        taken = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            path.rename(taken)
            if content_of(taken) != last:  # it was: this is its new one
                taken.rename(path)
                return None
            taken.unlink()
        return cls(path, name) if written_first(path, name) else None

    def end(self) -> None:
        """Stop, and remove the file if it is still this process's."""
        if os.getpid() == self.process and not self.over.is_set():
            self.over.set()
            atexit.unregister(self.end)
            if content_of(self.path).startswith(self.name):
                self.path.unlink(missing_ok=True)


def written_first(path: Path, name: str) -> bool:
    """Make a file with its holder's name; False if there is one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(name)
    return True


def beat(path: Path, name: str, over: threading.Event) -> None:
    """Write into the file again and again, for as long as it is this process's."""
    count = 0
    while not over.wait(BEAT_S):
        if not content_of(path).startswith(name):
            return
        count += 1
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{name} {count}")


def silent(path: Path, last: str) -> bool:
    """Whether nobody changes the file's `last` content for SILENT_S seconds; takes that long to
    find out."""
    began, said = time.monotonic(), False
    while time.monotonic() - began < SILENT_S:
        if content_of(path) != last:
            return False
        if time.monotonic() - began > 2 * BEAT_S and not said:
            said = True
            holder = " ".join(last.split()[:2]) or "another process"
            print(
                f"{path.parent} was last held by {holder}: seeing for {SILENT_S:.0f} s whether it "
                "is alive",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(POLL_S)
    return True


def content_of(path: Path) -> str:
    """Return a small file's text, read anew; empty where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(1000).decode(errors="replace")
    except OSError:
        return ""


def same_file(descriptor: int, path: Path) -> bool:
    """Whether a path still is that of an open file."""
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
