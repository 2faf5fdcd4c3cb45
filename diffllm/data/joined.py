"""Tokens of several places, one behind the other."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Part(Protocol):
    """Tokens that can be read at any place, of a stream or of a file."""

    def __len__(self) -> int:
        """Count the tokens."""

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), (stop - start,) int64."""


class JoinedStream:
    """The tokens of several streams or files, one behind the other."""

    def __init__(self, split: str, parts: Sequence[Part]) -> None:
        self.split, self.parts = split, list(parts)
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        """The place behind each part's last token, (parts,)."""

    def __len__(self) -> int:
        return int(self.ends[-1])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), (stop - start,) int64, across the borders of parts."""
        check_range(start, stop, len(self))
        out = np.empty(stop - start, np.int64)
        filled, number = 0, int(np.searchsorted(self.ends, start, side="right"))
        while filled < len(out):
            part = self.parts[number]
            first = start + filled - int(self.ends[number]) + len(part)
            last = min(first + len(out) - filled, len(part))
            out[filled : filled + last - first] = part.tokens(first, last)
            filled, number = filled + last - first, number + 1
        return out


def check_range(start: int, stop: int, length: int) -> None:
    """Raise IndexError unless tokens [start, stop) lie in a stream of that length."""
    if not 0 <= start <= stop <= length:
        raise IndexError(f"tokens [{start}, {stop}) of a stream of {length}")
