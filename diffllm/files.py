"""Files and directories that are there whole or not at all, for one process at a time."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from diffllm.errors import CheckpointError, ConfigError


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file in one step: a reader sees its former content or all of the new one.

    Where it cannot be written, OSError is raised and nothing partial stays behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file of a run; raises CheckpointError where that cannot be done."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def hold(path: Path, kind: str, instead: str) -> FileLock:
    """Make a directory and keep other processes out of it until this one ends.

    Raises ConfigError, which calls it a `kind` such as "run directory", if another process is
    there, or if it cannot be written: then `instead` is the key to change.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"{kind} {path} is in use by another process") from None
    except OSError as error:
        raise ConfigError(
            f"{kind} {path} cannot be written ({error.strerror}); choose {instead}"
        ) from error
    return lock


def build_once(final: Path, build: Callable[[Path], None]) -> None:
    """Create the directory `final` by calling `build` on a temporary sibling, then rename it.

    However many processes ask, one builds and the others wait for it. A build that dies at any
    moment leaves no `final`; what it left behind is removed by the next one.
    """
    if final.is_dir():
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{final}.lock"):
        if final.is_dir():
            return
        # Whoever wrote these held the lock and is gone.
        for leftover in final.parent.glob(f"{final.name}.tmp-*"):
            shutil.rmtree(leftover)
        temporary = final.with_name(f"{final.name}.tmp-{os.getpid()}")
        temporary.mkdir()
        try:
            build(temporary)
            for path in [*temporary.iterdir(), temporary]:
                sync(path)
            os.rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(final.parent)


def sync(path: Path) -> None:
    """Sync a file's content, or the names in a directory, to disk, so that they outlive a power
    cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
