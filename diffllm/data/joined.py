"""Tokens of several places, one behind the other."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from diffllm.data.shards import Stream


class Readable(Protocol):
    """Tokens that can be read at any place, of a stream or of a file."""

    def __len__(self) -> int:
        """Count the tokens."""

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), (stop - start,) int64."""


class JoinedTokens:
    """The tokens of several streams or files, one behind the other."""

    def __init__(self, parts: Sequence[Readable]) -> None:
        self.parts = list(parts)
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        """The place behind each part's last token, (parts,)."""

    def __len__(self) -> int:
        return int(self.ends[-1])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), (stop - start,) int64, across the borders of parts."""
        out = np.empty(stop - start, np.int64)
        for number, first, last, place in self.spans(start, stop):
            out[place : place + last - first] = self.parts[number].tokens(first, last)
        return out

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what [start, stop) is of each part: the part's number, the first token and the one
        behind the last in it, and their place in the whole stretch."""
        check_range(start, stop, len(self))
        filled, number = 0, int(np.searchsorted(self.ends, start, side="right"))
        while filled < stop - start:
            length = len(self.parts[number])
            first = start + filled - int(self.ends[number]) + length
            last = min(first + stop - start - filled, length)
            yield number, first, last, filled
            filled, number = filled + last - first, number + 1


class JoinedStream(JoinedTokens):
    """Several streams of one split, one behind the other."""

    def __init__(self, split: str, streams: Sequence[Stream]) -> None:
        super().__init__(streams)
        self.split, self.streams = split, list(streams)

    @property
    def masked(self) -> bool:
        """Whether some tokens may be only context."""
        return any(stream.masked for stream in self.streams)

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Read which of tokens [start, stop) are to be predicted, (stop - start,) bool."""
        out = np.empty(stop - start, np.bool_)
        for number, first, last, place in self.spans(start, stop):
            out[place : place + last - first] = self.streams[number].loss_mask(first, last)
        return out


def check_range(start: int, stop: int, length: int) -> None:
    """Raise IndexError unless tokens [start, stop) lie in a stream of that length."""
    if not 0 <= start <= stop <= length:
        raise IndexError(f"tokens [{start}, {stop}) of a stream of {length}")
