"""Streams of tokens that are read from files.

Files are read with system calls, not memory-mapped. If a file is truncated or the disk fails, a
read raises an error. With a memory map, the process would be killed before it saves a checkpoint.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from diffllm.core.errors import DataError
from diffllm.core.files import open_regular
from diffllm.core.targets import CONTEXT_TARGET
from diffllm.data.shards import Manifest, token_dtype
from diffllm.data.verified import again, identity_in, identity_of, matches, usable

MOST_OPEN = 256
BLOCK = 2**22
SHORT_BLOCK = 2**12
"""Tokens per read: BLOCK for searches and counts, SHORT_BLOCK for the end of one document."""


class FileArray:
    """Array (n,) of the numbers in a file; an element is read from the file on access.

    Forked processes may use the same object, because reads do not move a shared file position.
    """

    def __init__(
        self, path: Path, dtype: Any, offset: int = 0, count: int | None = None, advice: str = ""
    ) -> None:
        """Open a file of numbers of type `dtype`.

        Raises DataError if the file is too short. If `count` is None, also raises DataError if the
        last number in the file is incomplete.

        Args:
            offset: number of bytes before the first number.
            count: length n of the array; None reads up to the end of the file.
            advice: text that is appended to error messages.
        """
        self.path = path
        self.dtype = np.dtype(dtype)
        self.offset = offset
        self.advice = advice
        with usable(path):
            file = open_regular(path, 2**63, follow=True)
        # This reference keeps the file open until the array is deleted.
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        stat = os.fstat(self._descriptor)
        self.identity = identity_in(stat)
        """Size, times and inode of the file at opening; every later write changes the times."""
        self._written = (stat.st_size, stat.st_mtime_ns)
        available, rest = divmod(stat.st_size - offset, self.dtype.itemsize)
        self._count = available if count is None else count
        fits = 0 <= self._count <= available
        is_last_incomplete = count is None and rest > 0
        if not fits or is_last_incomplete:
            raise self._unusable(
                f"{stat.st_size:,} bytes, which are not {self._count:,} numbers of "
                f"{self.dtype.itemsize} bytes after byte {offset:,}: truncated, or of another type"
            )

    @property
    def end(self) -> int:
        return self.offset + self._count * self.dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """Read one number for an int `index`, or an array for a slice or an index array.

        A slice must not have a step. An index array is an int array (k,). Negative indices count
        from the end. Raises DataError for an index outside the array, or if the file has changed.
        """
        if isinstance(index, slice):
            start, stop, _ = index.indices(self._count)
            return self._read(start, max(start, stop))
        if isinstance(index, np.ndarray):
            least = int(index.min(initial=self._count))
            most = int(index.max(initial=0))
            is_inside = 0 <= least <= most < self._count
            # One read of nearby numbers is faster than many small reads.
            if is_inside and most < least + 64 * len(index):
                numbers = self._read(least, most + 1)
                return numbers[index - least]
            return np.array([self[int(i)] for i in index], self.dtype)
        start = index + self._count if index < 0 else index
        if not 0 <= start < self._count:
            raise self._unusable(f"index {index} is outside its {self._count} numbers")
        numbers = self._read(start, start + 1)
        return numbers[0]

    def _read(self, start: int, stop: int) -> np.ndarray:
        numbers = np.empty(stop - start, self.dtype)
        place = self.offset + start * self.dtype.itemsize
        read_bytes = 0
        with usable(self.path):
            # On Linux, one call reads at most 2 GiB.
            while read_bytes < numbers.nbytes:
                unread = numbers.view(np.uint8)[read_bytes:]
                size = os.preadv(self._descriptor, [unread.data], place + read_bytes)
                if not size:
                    raise self._unusable("truncated after it was opened")
                read_bytes += size
            stat = os.fstat(self._descriptor)
        # Compare after the read, so that a write during the read is also detected.
        if (stat.st_size, stat.st_mtime_ns) != self._written:
            raise self._unusable("changed after it was opened")
        return numbers

    def _unusable(self, problem: str) -> DataError:
        return DataError(f"{self.path}: {problem}{self.advice}")


def checked_array(path: Path, dtype: Any, sha256: str) -> FileArray:
    """Open a cache file as an array of `dtype` numbers.

    Raises DataError if the SHA-256 of the file differs from `sha256`.
    """
    array = FileArray(path, dtype, advice=f"; {again(path.parent)}")
    with usable(path):
        # The identity shows that the opened file is the one that was hashed.
        if not matches(path, sha256) or identity_of(path) != array.identity:
            raise array._unusable(f"damaged: its sha256 is not the manifest's {sha256[:12]}...")
    return array


def check_size(path: Path, expected: int) -> None:
    with usable(path):
        size = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
    if size != f"{expected} bytes":
        raise DataError(f"{path}: {size}, expected {expected} bytes; {again(path.parent)}")


class Readable(Protocol):
    def __len__(self) -> int:
        """Return the number of tokens."""

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop) of the stream, (stop - start,) int64."""


class Stream(Readable, Protocol):
    split: str

    @property
    def masked(self) -> bool:
        """Whether the stream may contain context tokens (prompts), which the loss ignores."""

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Read the loss mask of tokens [start, stop), (stop - start,) bool; False for context."""


def as_targets(stream: Stream, start: int, tokens: np.ndarray) -> np.ndarray:
    """Return `tokens` with CONTEXT_TARGET in place of each token that the loss mask excludes.

    `tokens`, (n,) int64, are the tokens of `stream` from position `start` on.
    """
    if not stream.masked:
        return tokens
    is_predicted = stream.loss_mask(start, start + len(tokens))
    return np.where(is_predicted, tokens, CONTEXT_TARGET)


def token_counts(
    read: Callable[[int, int], np.ndarray], start: int, stop: int, vocab_size: int
) -> np.ndarray:
    """Return how often each token id occurs in positions [start, stop), (vocab_size,) int64.

    `read(a, b)` returns the token ids at positions [a, b). Negative ids (context) are not counted.
    """
    counts = np.zeros(vocab_size, np.int64)
    for begin in range(start, stop, BLOCK):
        targets = read(begin, min(begin + BLOCK, stop))
        counts += np.bincount(targets[targets >= 0], minlength=vocab_size)
    return counts


def document_ends(
    stream: Readable, eos_id: int, start: int = 0, block: int = BLOCK
) -> Iterator[tuple[int, np.ndarray]]:
    """Find the document ends in a stream from position `start` on, reading `block` tokens at once.

    A document end is the position after an EOS token. Yields one tuple per block: the position
    after the block, then the ends of the documents whose EOS is in the block, (n,) int64.
    """
    for begin in range(start, len(stream), block):
        stop = min(begin + block, len(stream))
        # The tokens have no name: they would stay in memory while the caller uses the ends.
        yield stop, begin + 1 + np.flatnonzero(stream.tokens(begin, stop) == eos_id)


def document_end(stream: Readable, eos_id: int, position: int) -> int:
    """Return the end of the document that contains the token at `position`.

    The end is the position after the first EOS at or after `position`. Without such an EOS, the end
    is the length of the stream.
    """
    for _, ends in document_ends(stream, eos_id, position, SHORT_BLOCK):
        if len(ends):
            return int(ends[0])
    return len(stream)


def check_range(start: int, stop: int, length: int) -> None:
    if not 0 <= start <= stop <= length:
        raise IndexError(
            f"start={start} and stop={stop} must satisfy 0 <= start <= stop <= {length}, the "
            "length of the stream"
        )


def spans(ends: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Split the range [start, stop) of several concatenated arrays into one range per array.

    `ends[i]` is the end of array i in the concatenation. Yields (i, a, b) for each array i that
    overlaps [start, stop); the elements [a, b) of array i are the overlap.
    """
    number = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        begin = int(ends[number - 1]) if number else 0
        end = int(ends[number])
        # Empty arrays contain no part of the range.
        if end > start:
            yield number, start - begin, min(end, stop) - begin
        start = end
        number += 1


def read_joined(
    ends: np.ndarray, start: int, stop: int, dtype: Any, read: Callable[[int, int, int], np.ndarray]
) -> np.ndarray:
    """Read the range [start, stop) of several concatenated arrays, (stop - start,) of `dtype`.

    `ends[i]` is the end of array i in the concatenation. `read(i, a, b)` must return the elements
    [a, b) of array i.
    """
    length = int(ends[-1]) if len(ends) else 0
    check_range(start, stop, length)
    # Not np.concatenate, which needs at least one array and keeps the type of the arrays: shards
    # contain unsigned integers, but tokens are int64.
    joined = np.empty(stop - start, dtype)
    place = 0
    for number, first, last in spans(ends, start, stop):
        size = last - first
        joined[place : place + size] = read(number, first, last)
        place += size
    return joined


class JoinedTokens:
    def __init__(self, parts: Sequence[Readable]) -> None:
        self.parts = list(parts)
        lengths = [len(part) for part in parts]
        self.ends = np.cumsum(lengths, dtype=np.int64)
        """Place after the last token of each part, (parts,)."""

    def __len__(self) -> int:
        return int(self.ends[-1])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        def read(number: int, start: int, stop: int) -> np.ndarray:
            return self.parts[number].tokens(start, stop)

        return read_joined(self.ends, start, stop, np.int64, read)


class JoinedStream(JoinedTokens):
    def __init__(self, split: str, streams: Sequence[Stream]) -> None:
        super().__init__(streams)
        self.split = split
        self.streams = list(streams)
        self.masked = any(stream.masked for stream in streams)

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        def read(number: int, start: int, stop: int) -> np.ndarray:
            return self.streams[number].loss_mask(start, stop)

        return read_joined(self.ends, start, stop, np.bool_, read)


class TokenStream:
    """Tokens of one split of a prepared corpus, read from shard files on access.

    The constructor checks the file sizes; the first read of a shard verifies its checksum.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str) -> None:
        self._arguments = directory, manifest, split
        self.split = split
        self._directory = directory
        self._shards = manifest.split(split).shards
        self.masked = manifest.splits[split].masked
        self._dtype = token_dtype(manifest.vocab_size)
        shard_tokens = [shard.tokens for shard in self._shards]
        self._ends = np.cumsum(shard_tokens, dtype=np.int64)
        # The cache closes the oldest files: a process can open only a limited number of files.
        self._array = lru_cache(MOST_OPEN)(checked_array)
        for shard in self._shards:
            check_size(directory / shard.file, shard.tokens * self._dtype.itemsize)
            if shard.mask:
                check_size(directory / shard.mask, shard.tokens)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def tokens(self, start: int, stop: int) -> np.ndarray:
        def read(number: int, start: int, stop: int) -> np.ndarray:
            shard = self._shards[number]
            array = self._array(self._directory / shard.file, self._dtype, shard.sha256)
            return array[start:stop]

        return read_joined(self._ends, start, stop, np.int64, read)

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        def read(number: int, start: int, stop: int) -> np.ndarray:
            shard = self._shards[number]
            if shard.mask is None or shard.mask_sha256 is None:
                return np.ones(stop - start, np.bool_)
            mask = self._array(self._directory / shard.mask, "u1", shard.mask_sha256)
            return mask[start:stop]

        return read_joined(self._ends, start, stop, np.bool_, read)

    # File descriptors are valid in one process only, so a copy opens the files again.
    def __reduce__(self) -> tuple[object, ...]:
        return TokenStream, self._arguments
