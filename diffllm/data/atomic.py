"""Directories that exist only when they are complete."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


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
    """Have a file's content, or the names in a directory, outlive a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
