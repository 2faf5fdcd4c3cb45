"""Atomic writes, reads of untrusted files, locks between processes, and paths from users.

Symbolic links are rejected for files that a run has written, but accepted for paths from users.
"""

import difflib
import errno
import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from diffllm.core.errors import CheckpointError, ConfigError, printable
from diffllm.core.printing import to_stderr

LONGEST_NAME, LONGEST_PATH = 255, 4096 - 128
"""Limits in bytes; names below a run directory need up to 128 bytes."""
LARGEST_JSON = 64 * 2**20
"""Limit in bytes; ten times the manifest of 100,000 parameters and 10,000 ranks."""
LARGEST_LINES = 4 * 2**30
LONGEST_LINE = 16 * 2**20
DEEPEST = 64
NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def user_path(text: str | Path, key: str) -> Path:
    """Expand ~ in `text`, a path that a user has set as the config value `key`.

    Raises ConfigError for an invalid path, but not for a missing file.
    """
    shown = f"{key}={str(text)[:300]}"
    try:
        str(text).encode()
        path = Path(text).expanduser()
        check_length(path, shown)
        with suppress(FileNotFoundError):
            path.stat()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, RuntimeError):
            reason = f"{Path(text).parts[0]} has no home directory"
        raise ConfigError(f"{shown} cannot be used: {reason}") from error
    return path


def similar_path(path: Path, fits: Callable[[Path], bool]) -> str:
    """Return '; did you mean PATH?' if `path` is missing and a similar path exists, else ''.

    Search for similar file names in `path.parent` and in outputs/PARENT, where PARENT is
    `path.parent`. Only consider paths for which `fits` returns true.
    """
    candidates: dict[str, Path] = {}
    # Of equal names, the one next to `path` has precedence.
    for directory in ("outputs" / path.parent, path.parent):
        with suppress(OSError):
            candidates |= {candidate.name: candidate for candidate in directory.iterdir()}
    for name in difflib.get_close_matches(path.name, candidates):
        similar = candidates[name]
        if fits(similar):
            return "" if os.path.lexists(path) else f"; did you mean {similar}?"
    return ""


def check_absent(path: Path, key: str) -> None:
    if os.path.lexists(path):
        raise ConfigError(f"{key}={path} already exists; choose a new directory")


def check_length(path: Path, shown: str) -> None:
    """Raise ConfigError if `path`, or a file or directory name in it, is too long.

    The error message begins with `shown`.
    """
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > LONGEST_NAME:
        raise ConfigError(f"{shown}: file name too long: {longest} bytes, maximum {LONGEST_NAME}")
    size = len(os.fsencode(path))
    if size > LONGEST_PATH:
        raise ConfigError(f"{shown}: path too long: {size} bytes, maximum {LONGEST_PATH}")


def why_no_file(path: Path) -> str:
    """Return why `path` is not a regular file, such as "is a symbolic link, not a file".

    Return "" if `path` is a regular file or missing.
    """
    try:
        # One call: another process may create or delete the file between two calls.
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if stat.S_ISLNK(mode):
        return "is a symbolic link, not a file"
    return "" if stat.S_ISREG(mode) else "is not a regular file"


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Convert a ValueError or OSError in this context to a CheckpointError that names `file`."""
    try:
        yield
    except (ValueError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"cannot be read: {error.strerror}"
        raise CheckpointError(f"{file} {reason}") from error


def _opened(path: Path, flags: int, follow: bool = False) -> int:
    """Open a regular file with `os.open` and `flags`; return the file descriptor.

    Raises OSError if the file is not regular or cannot be opened. If `follow` is false, also raises
    OSError for a symbolic link. The call does not block, even for a named pipe.
    """
    # O_NONBLOCK: without a writer, opening a named pipe would wait. O_NOCTTY: opening a terminal
    # must not make it the terminal of this process.
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    if not follow:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        # ELOOP means a link at `path` itself, or a circle of links among the parent directories.
        # ENXIO means a named pipe without a reader, or a socket.
        is_circle = error.errno == errno.ELOOP and not path.is_symlink()
        is_other_kind = error.errno in (errno.ELOOP, errno.ENXIO) and not is_circle
        if is_other_kind and not follow:
            raise OSError(errno.EINVAL, "Link or not a regular file", str(path)) from error
        raise
    # The check is on the descriptor, because another process could replace the file at `path`.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


def open_regular(file: Path, most: int, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading; follow a symbolic link only if `follow` is true.

    Raises OSError if the file cannot be opened. Raises ValueError if the file is not regular or
    has more than `most` bytes. The message of the ValueError omits the file name, for example
    "has 9 bytes, more than 8".
    """
    try:
        descriptor = _opened(file, os.O_RDONLY, follow)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENXIO):
            raise
        problem = "is not a regular file" if follow else "is a link or not a regular file"
        raise ValueError(problem) from error
    size = os.fstat(descriptor).st_size
    if size > most:
        os.close(descriptor)
        raise ValueError(f"has {size:,} bytes, more than {most:,}")
    return os.fdopen(descriptor, "rb")


def read_bytes(file: Path, most: int = LARGEST_JSON, follow: bool = False) -> bytes:
    with open_regular(file, most, follow) as stream:
        # Limit the size here, too: the file may have grown since the check.
        return stream.read(most)


def read_text(file: Path, most: int = LARGEST_JSON, follow: bool = False) -> str:
    try:
        return read_bytes(file, most, follow).decode()
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a regular file as text, with U+FFFD in place of invalid UTF-8.

    A line of more than LONGEST_LINE bytes is yielded in several parts. Raises OSError if the file
    cannot be opened. Raises ValueError if the file is not regular or has more than LARGEST_LINES
    bytes.
    """
    with open_regular(file, LARGEST_LINES) as stream:
        while line := stream.readline(LONGEST_LINE):
            yield line.decode(errors="replace")


def read_json(file: Path, most: int = LARGEST_JSON, follow: bool = False) -> dict[str, Any]:
    """Read a JSON object from a regular file; `most` and `follow` are as in `open_regular`.

    Raises OSError if the file cannot be opened, and ValueError if the file is invalid.
    """
    content = parse_json(read_text(file, most, follow))
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    return content


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError for invalid text, deep nesting and integers beyond 64 bits.

    The message does not name the file that contains the text, for example "is nested too deeply".
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    check_plain(content)
    return content


def check_plain(value: Any, depth: int = DEEPEST) -> None:
    """Raise ValueError if `value` contains integers beyond 64 bits or invalid Unicode text.

    Also raise ValueError if lists and mappings are nested more than `depth` levels deep.
    """
    if isinstance(value, dict | list):
        if not depth:
            raise ValueError("is nested too deeply")
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        for part in parts:
            check_plain(part, depth - 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("contains a number beyond 64 bits")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("contains an unpaired surrogate, which is not text") from None


def acquire(path: Path, wait: bool = True) -> FileLock:
    """Lock a file and return the lock, which ends with `lock.release()` or with this process.

    If another process holds the lock, wait if `wait` is true, otherwise raise Timeout. Raises
    OSError if the file cannot be locked.
    """
    problem = why_no_file(path)
    if problem:
        raise OSError(errno.EINVAL, f"its lock {problem}", str(path))
    lock = FileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=sign)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except OSError as error:
        if error.errno in NO_FLOCK:
            raise OSError(
                error.errno, "its file system does not support flock", str(path)
            ) from None
        raise
    return lock


@contextmanager
def locked(path: Path, activity: str = "") -> Iterator[None]:
    """Lock a file while this context is active; wait while another process holds the lock.

    If `activity` is not empty, print "waiting for PROCESS, which ACTIVITY" on stderr before a wait.
    Raises OSError if the file cannot be locked.
    """
    try:
        # With an activity, the first attempt does not wait, so that a message can name the holder.
        lock = acquire(path, wait=not activity)
    except Timeout:
        to_stderr(f"waiting for {holder(path)}, which {activity}")
        lock = acquire(path)
    try:
        yield
    finally:
        lock.release()


def sign(descriptor: int) -> None:
    # The lock works without this text, for example on a full disk.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        text = f"process {os.getpid()} on {socket.gethostname()}"
        os.write(descriptor, text.encode())


def holder(path: Path) -> str:
    """Return which process has locked the lock file `path`, such as 'process 17 on node3'.

    Return 'another process' if the lock file does not name a process.
    """
    with suppress(OSError, ValueError):
        return printable(read_text(path, most=1000)) or "another process"
    return "another process"


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: after a power failure the file has the old or the new content.

    If `path` is a symbolic link, replace the link itself. On failure, remove the partial file and
    raise OSError.
    """
    # The rename would replace a named pipe or a device, such as /dev/null.
    if path.exists() and not (path.is_symlink() or path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # A killed process may have left this file, if a process of this id ran before.
        partial.unlink(missing_ok=True)
        with open(partial, "xb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            # Without this sync, the new name could survive a power failure with empty content.
            os.fsync(stream.fileno())
        # This raises OSError if the path is a directory.
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    # The sync of the directory makes the new name durable.
    sync(path.parent)


def open_to_append(path: Path) -> int:
    """Open or create a regular file to append; return the file descriptor.

    Raises OSError if the file is not regular or cannot be opened.
    """
    return _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def open_to_write(path: Path) -> int:
    descriptor = _opened(path, os.O_WRONLY | os.O_CREAT)
    os.ftruncate(descriptor, 0)
    return descriptor


def write_atomic(path: Path, content: str | bytes, new_parents: int = 0) -> None:
    """Write a file of a run atomically; raises CheckpointError on failure.

    `new_parents` is the number of parent directories to create if missing. For example, 2 creates
    `path.parent.parent` and `path.parent`.
    """
    try:
        for parent in reversed(path.parents[:new_parents]):
            parent.mkdir(exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def sync(path: Path) -> None:
    """Call fsync for a file or for the entries of a directory. Raises OSError on failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync a directory; its names need no sync there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
