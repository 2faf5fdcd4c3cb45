"""Files of tokens: what one has to say of itself, and what all have in common."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.core.errors import DataError
from diffllm.core.files import open_regular
from diffllm.data.file_array import FileArray
from diffllm.data.verified import usable

SAMPLED = 64
"""Places of a file that its fingerprint reads, beside its ends."""
BLOCK = 1 << 16
LOOKED_AT = 100
"""Documents whose last tokens say whether all end with the token for that."""


@dataclass
class TokenFile:
    """The tokens of a file and the ends of its documents."""

    path: Path
    content: FileArray
    """All tokens, (n,), of any integer type."""
    end_of: Callable[[Any], Any]
    """The place after document i, from 0; for several documents (n,), their places, (n,) int64."""
    documents: int
    pieces: int
    """The number of the tokenizer's pieces: every token is below it."""

    def __len__(self) -> int:
        return len(self.content)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), (stop - start,) int64; raises DataError for one that is no
        piece of the tokenizer."""
        tokens: np.ndarray = self.content[start:stop].astype(np.int64)
        check_pieces(self.path, tokens, self.pieces)
        return tokens


class WithEnds:
    """A file whose documents lack the token that ends one, read as if each had it."""

    def __init__(self, file: TokenFile, eos_id: int) -> None:
        self.file, self.eos_id = file, eos_id
        self.path, self.documents = file.path, file.documents

    def __len__(self) -> int:
        return len(self.file) + self.documents

    def end_of(self, document: Any) -> Any:
        """The place after document i and its end token; or the places of several documents."""
        return self.file.end_of(document) + document + 1

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), (stop - start,) int64; raises as the file does."""
        out = np.full(stop - start, self.eos_id, dtype=np.int64)
        document = bisect_right(range(self.documents), start, key=self.end_of)
        while start < stop:
            end = self.end_of(document)
            if not document <= start < end <= len(self):
                raise DataError(f"{self.path}: the documents of its index do not follow each other")
            last = min(stop, end - 1)  # what is at end - 1 is the mark
            if start < last:
                place = len(out) - (stop - start)
                out[place : place + last - start] = self.file.tokens(
                    start - document, last - document
                )
            start, document = end, document + 1
        return out


Tokens = TokenFile | WithEnds


def ended(file: TokenFile, eos_id: int) -> Tokens:
    """The file, with ends where its documents have none; raises DataError where only some have."""
    looked_at = np.unique(np.linspace(0, file.documents - 1, LOOKED_AT).astype(np.int64))
    ends = [file.end_of(int(i)) for i in looked_at]
    if min(ends) < 0 or max(ends) > len(file):
        raise DataError(f"{file.path}: its index has documents outside of the file")
    last = [int(file.content[end - 1]) == eos_id for end in ends if end]
    if all(last):
        return file
    if any(last):
        raise DataError(
            f"{file.path}: {sum(last)} of {len(last)} documents end with token {eos_id}, the "
            "tokenizer's end of a document, and others do not: is this its tokenizer?"
        )
    return WithEnds(file, eos_id)


def documents_in(file: Tokens, start: int, stop: int) -> int:
    """Count the documents of the index that have tokens in [start, stop)."""
    found = begin = 0
    for first in range(0, file.documents, BLOCK):
        ends = file.end_of(np.arange(first, min(first + BLOCK, file.documents)))
        begins, begin = np.append(begin, ends[:-1]), ends[-1]
        found += int((np.minimum(ends, stop) > np.maximum(begins, start)).sum())
    return found


def check_pieces(path: Path, tokens: np.ndarray, pieces: int) -> None:
    """Raise DataError for a token that is no piece of the tokenizer, which has so many."""
    if tokens.max(initial=0) >= pieces or tokens.min(initial=0) < 0:
        wrong = tokens[(tokens >= pieces) | (tokens < 0)][0]
        raise DataError(
            f"{path}: token {wrong} is none of the tokenizer's {pieces:,} pieces: it was written "
            "with another one, or the file has changed"
        )


def fingerprint(path: Path) -> str:
    """Hash a file's size, its ends, and blocks that lie evenly over it: no more is read of a large
    one."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    starts = np.unique(np.linspace(0, max(0, size - BLOCK), SAMPLED).astype(np.int64))
    with usable(path), open_regular(path, 2**63, follow=True) as file:
        for start in starts.tolist():
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def array_in(path: Path, dtype: str, offset: int = 0, count: int | None = None) -> FileArray:
    """Open a file as an array; raises DataError where it is not as long, or of whole numbers."""
    kind = np.dtype(dtype)
    try:
        size = path.stat().st_size - offset
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    there = size // kind.itemsize
    if size < 0 or (count is None and size % kind.itemsize) or (count or 0) > there:
        wanted = f"{count:,} numbers" if count is not None else "whole numbers"
        raise DataError(
            f"{path}: {max(size, 0):,} bytes where {wanted} of {kind.itemsize} are expected: it is "
            "cut off, or of another type"
        )
    return FileArray(path, kind, offset, count)


def check_last_end(path: Path, end: int, length: int) -> None:
    """Raise DataError unless the last document's end is that of the tokens; the ends before it are
    too many to be read at every start."""
    if end != length:
        raise DataError(f"{path}: its documents end at token {end:,}, its tokens at {length:,}")
