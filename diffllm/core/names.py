"""Names of directories, and names of limited length."""

import hashlib
import os
from pathlib import Path


def shortened(name: str, longest: int) -> str:
    """Replace the end of a name of more than `longest` characters by a hash of the name."""
    if len(name) <= longest:
        return name
    return f"{name[: longest - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def directory_name(path: Path) -> str:
    """Return the name of a directory, also for paths such as "." and "runs/..".

    `Path.name` is "" or ".." for these paths.
    """
    return os.path.basename(os.path.abspath(path))
