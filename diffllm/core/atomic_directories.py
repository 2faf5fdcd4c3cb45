"""Directories that appear only with complete content."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from diffllm.core.errors import InUseError
from diffllm.core.files import acquire, holder, sync


def build_once(final: Path, build: Callable[[Path], None]) -> None:
    """Create the directory `final` unless `final` exists.

    `build` writes the content to a scratch directory, which is then renamed to `final`. If several
    processes call this function, one process builds and the others wait. Raises OSError if the
    directory cannot be written.
    """
    if final.is_dir():
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(final, wait=True) as scratch:
        # Another process may have built the directory during the wait.
        if not final.is_dir():
            build(scratch)
            publish(scratch, final)


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield an empty scratch directory, and rename it to `final` when the context ends.

    After an exception, remove the scratch directory instead. Raises FileExistsError if `final`
    exists, and InUseError if another process is creating `final`.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(final) as scratch:
        # Another process may just have completed the directory.
        refuse_existing(final)
        yield scratch
        publish(scratch, final)


@contextmanager
def scratch_directory(final: Path, wait: bool = False) -> Iterator[Path]:
    """Create and yield an empty hidden directory next to `final`.

    When the context ends, remove the hidden directory unless the caller has renamed it. If another
    process is writing `final`, wait if `wait` is true, otherwise raise InUseError.
    """
    name = f".{final.name}"
    # With a suffix, a name must have at most 255 bytes.
    if len(os.fsencode(name)) > 200:
        name = f".{hashlib.sha256(os.fsencode(final.name)).hexdigest()}"
    scratch = final.with_name(f"{name}.partial")
    lock_file = final.with_name(f"{name}.lock")
    try:
        lock = acquire(lock_file, wait)
    except Timeout:
        raise InUseError(
            f"{final} is being written by {holder(lock_file)}; try again later"
        ) from None
    try:
        # A killed process may have left its directory; the lock shows that the process has ended.
        if scratch.is_dir() and not scratch.is_symlink():
            shutil.rmtree(scratch)
        scratch.unlink(missing_ok=True)
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        # Delete the lock before its release, so that a waiting process creates a new lock.
        with suppress(OSError):
            lock_file.unlink()
        lock.release()


def publish(scratch: Path, final: Path, files_synced: bool = False) -> None:
    """Sync the directory `scratch` and its files to disk, and rename `scratch` to `final`.

    If `files_synced` is true, skip the sync of the files, because the caller has synced them.
    Raises FileExistsError if `final` exists.
    """
    for path in [scratch] if files_synced else [*scratch.rglob("*"), scratch]:
        sync(path)
    # A rename would replace an empty directory.
    refuse_existing(final)
    os.rename(scratch, final)
    # The sync of the parent makes the new name durable.
    sync(final.parent)


def refuse_existing(final: Path) -> None:
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
