"""Directories of runs and sweeps: creation under new names, and locks until a process ends."""

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from diffllm.core.errors import ConfigError, InUseError
from diffllm.core.files import acquire, holder
from diffllm.core.printing import to_stderr
from diffllm.core.run_files import RunFile


def numbered(path: Path) -> Iterator[Path]:
    """Yield `path`, `path`-2, `path`-3, and so on."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def reserve(path: Path, kind: str, instead: str) -> tuple[Path, list[Path]]:
    """Create the directory `path`, or else the first of `path`-2, `path`-3, ... that is unused.

    Processes that call this function at the same time get different directories. Return the new
    directory and the list of all created paths, innermost first, for `hold` and `take_back`. Raises
    ConfigError if the directory cannot be created. For `kind` and `instead`, see `hold`.
    """
    parents = [parent for parent in path.parents if not os.path.lexists(parent)]
    try:
        directory = next(name for name in numbered(path) if create(name))
    except OSError as error:
        raise not_writable(path, kind, instead, error) from error
    return directory, [directory, *parents]


def create(directory: Path) -> bool:
    """Create a directory and its parents; return False if the directory already exists.

    Only one of several processes creates a directory, because the system does so atomically.
    """
    while True:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            # A file, or a directory that another process took back before mkdir saw its kind.
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(error.filename).st_mode):
                    raise
            continue
        try:
            directory.mkdir()
        except FileExistsError:
            return False
        except FileNotFoundError:
            # Another process has just taken back the empty parent.
            continue
        return True


def hold(
    path: Path, kind: str, instead: str, wait: bool = False, created: Sequence[Path] = ()
) -> FileLock:
    """Create the directory `path` if missing, and lock `path` until this process ends.

    Return the lock. If another process holds the lock, wait if `wait` is true, otherwise raise
    InUseError. Raises ConfigError if the directory cannot be created or locked.

    Args:
        kind: term for the directory in messages, such as "run directory".
        instead: text after "choose" in error messages, such as "another run.dir".
        created: paths that `reserve` has created for this process; removed again after a failure.
    """
    lock = path / RunFile.LOCK
    new_paths = [*missing(path), *created]
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            return acquire(lock, wait=False)
        except Timeout:
            if not wait:
                raise InUseError(
                    f"{kind} {path} is in use by {holder(lock)}; wait, or choose {instead}"
                ) from None
            to_stderr(f"waiting until {holder(lock)} releases {path}")
            return acquire(lock)
    except OSError as error:
        for part in new_paths:
            # The part is missing, or another process uses the directory.
            with suppress(OSError):
                if part == lock:
                    part.unlink()
                else:
                    part.rmdir()
        raise not_writable(path, kind, instead, error) from error


def missing(path: Path) -> list[Path]:
    """List the paths that `hold(path)` would create, innermost first.

    These are the lock file in `path`, `path` itself and all parent directories, if missing.
    """
    places = (path / RunFile.LOCK, path, *path.parents)
    return [place for place in places if not os.path.lexists(place)]


def take_back(path: Path, created: list[Path]) -> None:
    """Delete the paths in `created`, which `hold(path)` has created.

    If `path` itself is in `created`, delete `path` with all its content. Delete a parent directory
    only if it is empty.
    """
    for part in created:
        with suppress(OSError):
            if part == path:
                shutil.rmtree(path)
            elif part in path.parents:
                part.rmdir()
            else:
                part.unlink()


def not_writable(path: Path, kind: str, instead: str, error: OSError) -> ConfigError:
    return ConfigError(f"{kind} {path} cannot be written ({error.strerror}); choose {instead}")
