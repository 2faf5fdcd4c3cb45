"""Files and directories that are there whole or not at all, also after a power cut.

Nothing is written through a symbolic link in place of a file: what it leads to is another's.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from diffllm.core.errors import CheckpointError, InUseError
from diffllm.core.files.locks import acquire, holder


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file in one step: a reader sees its former content or all of the new one, and so does
    one after a power cut.

    A symbolic link of that name is replaced, not followed. If the file cannot be written, OSError
    is raised and nothing partial stays behind.
    """
    if path.exists() and not (path.is_symlink() or path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.unlink(missing_ok=True)  # left by a killed process
        with open(partial, "xb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)  # fails for a directory
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def open_to_append(path: Path) -> int:
    """Open a file, made where it is missing, to write behind its end; return its descriptor.

    Raises OSError, also for a symbolic link and whatever else is no file.
    """
    return opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def open_to_write(path: Path) -> int:
    """Open a file, made where it is missing and emptied where it is not, as `open_to_append`."""
    descriptor = opened(path, os.O_WRONLY | os.O_CREAT)
    os.ftruncate(descriptor, 0)
    return descriptor


def opened(path: Path, flags: int) -> int:
    """Open a regular file, not through a symbolic link; never waits, as at a pipe."""
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags | safe, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "Is a symbolic link, not a file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file of a run; raises CheckpointError where that cannot be done."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def build_once(final: Path, build: Callable[[Path], None]) -> None:
    """Create the directory `final` by calling `build` on a scratch directory, then rename it.

    One process builds, and the others wait for it. A killed build leaves no `final`.
    """
    if final.is_dir():
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(final, wait=True) as scratch:
        if not final.is_dir():
            build(scratch)
            publish(scratch, final)


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield an empty scratch directory, which becomes `final` after the block, unless it raises.

    Raises OSError, also if `final` exists, and InUseError if another process is building it.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(final) as scratch:
        yield scratch
        publish(scratch, final)


@contextmanager
def scratch_directory(final: Path, wait: bool = False) -> Iterator[Path]:
    """Create an empty hidden directory next to `final`, which the block may rename.

    At the end, remove the directory if it still exists. A lock file next to it keeps other
    processes out. Under the lock, a directory of this name was left by a killed process and is
    removed. Raises OSError.

    Args:
        wait: wait for the lock; otherwise raise InUseError if another process has it.
    """
    name = f".{final.name}"
    if len(os.fsencode(name)) > 200:  # the longest name of a file has 255 bytes
        name = f".{hashlib.sha256(os.fsencode(final.name)).hexdigest()}"
    scratch, lock_file = final.with_name(f"{name}.partial"), final.with_name(f"{name}.lock")
    try:
        lock = acquire(lock_file, wait)
    except Timeout:
        raise InUseError(f"{final} is being written by {holder(lock_file)}") from None
    try:
        if scratch.is_dir() and not scratch.is_symlink():
            shutil.rmtree(scratch)
        scratch.unlink(missing_ok=True)
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):
            lock_file.unlink()  # before the release: a waiting process then makes a new one
        lock.release()


def publish(scratch: Path, final: Path, files_synced: bool = False) -> None:
    """Rename a directory to `final`, so that it outlives a power cut with all of its content.

    Raises OSError, also if `final` exists.

    Args:
        files_synced: the content is on disk already, only the names in the directory are not.
    """
    for path in [scratch] if files_synced else [*scratch.rglob("*"), scratch]:
        sync(path)
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    os.rename(scratch, final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Sync a file's content, or the names in a directory, to disk, so that they outlive a power
    cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems keep names without being asked, and refuse to be.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
