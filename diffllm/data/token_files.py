"""Read token files of other libraries: Megatron and datatrove.

In Megatron's format, NAME.bin contains the tokens. NAME.idx contains, in this order:
- 9 bytes: "MMIDIDX" and two zero bytes
- format version, 1 (uint64); number that denotes the dtype of the tokens (uint8)
- number of sequences S (uint64); number of documents plus 1, D (uint64)
- (S,) int32: length of each sequence in tokens
- (S,) int64: position of each sequence in NAME.bin, in bytes
- (D,) int64: index of the first sequence of each document, then S

In datatrove's format, which Nanotron also reads, NAME.ds contains the tokens. NAME.ds.index
contains, for each document, the number of tokens up to its end (uint64). The first line of
NAME.ds.metadata ends with the number of bytes per token.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.core.errors import DataError
from diffllm.core.files import open_regular, read_text
from diffllm.data.streams import FileArray
from diffllm.data.verified import usable

SAMPLES_PER_FILE, SAMPLE_BYTES = 64, 1 << 16
"""Content of a token file that `fingerprint` hashes."""
DOCUMENTS_AT_ONCE = 1 << 16
CHECKED_DOCUMENTS = 100
MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
DATATROVE_TYPES = {"2": "<u2", "4": "<u4"}


@dataclass
class TokenFile:
    path: Path
    content: FileArray
    """All tokens, (n,), of any integer type."""
    end_of: Callable[[Any], Any]
    """The place after document i; for several documents (n,), their places, (n,) int64."""
    documents: int
    pieces: int

    def __len__(self) -> int:
        return len(self.content)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens from `start` to `stop - 1` of the file, (stop - start,) int64.

        Raises DataError for a token id outside the vocabulary.
        """
        tokens: np.ndarray = self.content[start:stop].astype(np.int64)
        # Minimum and maximum first: they need no array of booleans for valid tokens.
        if tokens.max(initial=0) >= self.pieces or tokens.min(initial=0) < 0:
            is_invalid = (tokens >= self.pieces) | (tokens < 0)
            first_invalid = tokens[is_invalid][0]
            raise DataError(
                f"{self.path}: token id {first_invalid} is not in the tokenizer's vocabulary of "
                f"{self.pieces:,} tokens; set data.tokenizer to the tokenizer of this file"
            )
        return tokens


class WithEnds:
    """Token file without EOS, read as if each document ended with an EOS."""

    def __init__(self, file: TokenFile, eos_id: int) -> None:
        self.file = file
        self.eos_id = eos_id
        self.path = file.path
        self.documents = file.documents

    def __len__(self) -> int:
        return len(self.file) + self.documents

    def end_of(self, document: Any) -> Any:
        # Plus one EOS of each earlier document, and the EOS of this document.
        return self.file.end_of(document) + document + 1

    def tokens(self, start: int, stop: int) -> np.ndarray:
        out = np.full(stop - start, self.eos_id, dtype=np.int64)
        document = bisect_right(range(self.documents), start, key=self.end_of)
        while start < stop:
            end = self.end_of(document)
            if not document <= start < end <= len(self):
                raise DataError(
                    f"{self.path}: its index file has gaps or overlaps between documents; create "
                    "both files again"
                )
            # The token at end - 1 is the added EOS.
            text_stop = min(stop, end - 1)
            if start < text_stop:
                # Each earlier document has no EOS in the file, so places in the file are smaller.
                stored_tokens = self.file.tokens(start - document, text_stop - document)
                place = len(out) - (stop - start)
                out[place : place + text_stop - start] = stored_tokens
            start = end
            document += 1
        return out


Tokens = TokenFile | WithEnds


def open_tokens(path: Path, vocab_size: int, eos_id: int) -> Tokens:
    """Open a Megatron (.bin) or datatrove (.ds) file as tokens with an EOS after every document.

    At most 100 documents are checked. If all of these end with `eos_id`, the tokens are read as
    stored. If none of these ends with `eos_id`, the returned object inserts an EOS after each
    document when tokens are read. Raises DataError for an unusable file, or if only some
    of the checked documents end with `eos_id`.
    """
    file = OPENERS[path.suffix](path, vocab_size)
    checked = evenly_spaced(file.documents - 1, CHECKED_DOCUMENTS)
    ends = [file.end_of(int(document)) for document in checked]
    # Check only a sample of ends: reading all ends at every start would take too long.
    if min(ends) < 0 or max(ends) > len(file) or ends[-1] != len(file):
        raise DataError(
            f"{path} does not match its index: the index ends at token {ends[-1]:,}, but the file "
            f"has {len(file):,} tokens; create both files again"
        )
    # Empty documents at the beginning of the file have the end 0 and no last token.
    ends_with_eos = [int(file.content[end - 1]) == eos_id for end in ends if end]
    if all(ends_with_eos):
        return file
    if any(ends_with_eos):
        raise DataError(
            f"{path}: only {sum(ends_with_eos)} of {len(ends_with_eos)} documents end with token "
            f"{eos_id}, the EOS of the tokenizer, but all or none must; check data.tokenizer"
        )
    return WithEnds(file, eos_id)


def open_megatron(path: Path, vocab_size: int) -> TokenFile:
    """Open the Megatron token file NAME.bin with NAME.idx; raise DataError for an unusable file."""
    index = path.with_suffix(".idx")
    with usable(index), open_regular(index, 2**63, follow=True) as file:
        head = file.read(MEGATRON_HEADER.size)
    # The padding of a file that is too short fails one of the following checks.
    header = head.ljust(MEGATRON_HEADER.size)
    magic, version, code, sequences, marks = MEGATRON_HEADER.unpack(header)
    if magic != MAGIC or version != 1 or code not in MEGATRON_TYPES:
        raise DataError(
            f"{index}: not a Megatron index of version 1 with an integer token type; "
            "create the index and its .bin file again with Megatron"
        )
    lengths = FileArray(index, "<i4", MEGATRON_HEADER.size, sequences)
    places = FileArray(index, "<i8", lengths.end, sequences)
    firsts = FileArray(index, "<i8", places.end, marks)
    content = FileArray(path, MEGATRON_TYPES[code])
    bytes_per_token = content.dtype.itemsize
    is_contiguous = sequences == 1
    if sequences > 1:
        # Compare only a sample of sequences: comparing all sequences would take too long.
        checked = evenly_spaced(sequences - 2, CHECKED_DOCUMENTS)
        sizes = lengths[checked].astype(np.int64) * bytes_per_token
        ends = places[checked] + sizes
        is_contiguous = (ends == places[checked + 1]).all()
    if not is_contiguous or places[0] or marks < 2 or firsts[0] or int(firsts[-1]) != sequences:
        raise DataError(
            f"{index}: the index has gaps or overlaps between the documents of {path.name}; "
            "create both files again"
        )

    def end_of(document: Any) -> Any:
        last_sequence = firsts[document + 1] - 1
        end = places[last_sequence] // bytes_per_token + lengths[last_sequence]
        # Empty documents at the beginning have the last sequence -1 and the end 0. A product,
        # because `document` may be an array.
        return end * (last_sequence >= 0)

    return TokenFile(path, content, end_of, marks - 1, vocab_size)


def open_datatrove(path: Path, vocab_size: int) -> TokenFile:
    """Open a datatrove token file NAME.ds and its index; raise DataError for an unusable file.

    If NAME.ds.metadata is missing, the token size is assumed: 2 bytes if `vocab_size` <= 2**16,
    otherwise 4 bytes.
    """
    size = "2" if vocab_size <= 2**16 else "4"
    metadata = path.with_name(f"{path.name}.metadata")
    if metadata.is_file():
        with usable(metadata):
            first_line = read_text(metadata, follow=True).partition("\n")[0]
            size = first_line.rpartition("|")[2]
        if size not in DATATROVE_TYPES:
            raise DataError(
                f"{metadata}: the number of bytes per token is {size!r}, but must be 2 or 4; "
                "create the token file again"
            )
    content = FileArray(path, DATATROVE_TYPES[size])
    index = path.with_name(f"{path.name}.index")
    ends = FileArray(index, "<u8")
    if not len(ends):
        raise DataError(
            f"{index}: the index has no documents; delete {path.name} and its index, or create "
            "both files again"
        )
    return TokenFile(path, content, lambda i: ends[i].astype("int64"), len(ends), vocab_size)


OPENERS = {".bin": open_megatron, ".ds": open_datatrove}


def evenly_spaced(last: int, count: int) -> np.ndarray:
    """Return up to `count` distinct integers from 0 to `last` in ascending order, (n,) int64."""
    numbers = np.linspace(0, last, count).astype(np.int64)
    return np.unique(numbers)


def documents_in(file: Tokens, start: int, stop: int) -> int:
    """Return the number of documents that have tokens in the range [start, stop) of a file."""
    count = 0
    begin = 0
    for first in range(0, file.documents, DOCUMENTS_AT_ONCE):
        last = min(first + DOCUMENTS_AT_ONCE, file.documents)
        ends = file.end_of(np.arange(first, last))
        begins = np.append(begin, ends[:-1])
        begin = ends[-1]
        has_tokens = np.minimum(ends, stop) > np.maximum(begins, start)
        count += int(has_tokens.sum())
    return count


def fingerprint(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    starts = evenly_spaced(max(0, size - SAMPLE_BYTES), SAMPLES_PER_FILE)
    with usable(path), open_regular(path, 2**63, follow=True) as file:
        for start in starts.tolist():
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def index_files(path: Path) -> list[Path]:
    sisters = [path.with_suffix(".idx")]
    if path.suffix == ".ds":
        sisters = [path.with_name(f"{path.name}.{end}") for end in ("index", "metadata")]
    return [sister for sister in sisters if sister.is_file()]
