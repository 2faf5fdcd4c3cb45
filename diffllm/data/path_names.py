"""The names of files in a line."""

from collections.abc import Sequence
from pathlib import Path

from diffllm.core.errors import printable

MOST = 3
"""Names that are said."""


def names_of(paths: Sequence[str | Path]) -> str:
    """Return files' names without their directories, the fourth and all behind it as '...'."""
    names = [printable(Path(path).name) for path in paths[:MOST]]
    return ", ".join([*names, *["..."] * (len(paths) > MOST)])
