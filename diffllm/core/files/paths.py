"""Paths as users write them."""

import errno
import os
import stat
from pathlib import Path

from diffllm.core.errors import ConfigError

LONGEST_NAME, LONGEST_PATH = 255, 4096
"""Bytes that names and paths have at most where the file system does not say."""
BELOW = 128
"""Bytes of the names that a run writes below its directory."""


def user_path(text: str | Path, key: str) -> Path:
    """Return a path that a user has written, with ~ expanded; it need not exist.

    Raises ConfigError, which begins with `key`, for one that can lead nowhere: without such a user,
    longer than the file system takes, through a file, a loop of links or a forbidden directory.
    """
    written = str(text)
    shown = f"{key}={written if len(written) <= 300 else f'{written[:300]}...'}"
    try:
        written.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{shown} is not valid UTF-8") from None
    if "\0" in written:
        raise ConfigError(f"{shown} must not hold a NUL character")
    try:
        path = Path(written).expanduser()
    except RuntimeError:
        first = Path(written).parts[0]
        who = f"there is no user {first[1:]}" if first != "~" else "HOME is not set"
        raise ConfigError(f"{shown}: {first} has no meaning here: {who}") from None
    check_length(path, shown)
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{shown} cannot be reached: {reason(error)}") from error
    return path


def check_absent(path: Path, key: str) -> None:
    """Raise ConfigError if something has the name that a new directory is to have."""
    if os.path.lexists(path):
        raise ConfigError(f"{key}={path} is there already; choose a new directory")


def check_length(path: Path, shown: str) -> None:
    """Raise ConfigError, which begins with `shown`, for a path that is longer than the file system
    takes."""
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > (limit := longest_name(path)):
        raise ConfigError(f"{shown}: a name of {longest} bytes; there may be {limit}")
    if (size := len(os.fsencode(path))) > LONGEST_PATH - BELOW:
        raise ConfigError(f"{shown}: a path of {size} bytes; there may be {LONGEST_PATH - BELOW}")


def longest_name(path: Path) -> int:
    """Return the bytes that a name may have below the closest directory that exists."""
    for place in (path, *path.parents):
        try:
            return os.pathconf(place, "PC_NAME_MAX")
        except (OSError, ValueError):
            continue
    return LONGEST_NAME


def reason(error: OSError) -> str:
    """Describe in words why a path leads nowhere."""
    words = {
        errno.ENOTDIR: "a part of it is a file, not a directory",
        errno.ELOOP: "symbolic links in it lead in a circle",
        errno.EACCES: "permission denied",
    }
    return words.get(error.errno or 0, error.strerror or str(error))


def why_no_file(path: Path) -> str:
    """Say what is there in place of a file; nothing where a file is, or nothing."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(mode):
        return "is a symbolic link, not a file"
    if stat.S_ISDIR(mode):
        return "is a directory, not a file"
    return "" if stat.S_ISREG(mode) else "is not a regular file"
