"""Megatron's indexed datasets: NAME.bin, the tokens, and NAME.idx, where sequences lie.

The index: the magic MMIDIDX and two zeros, the version (uint64) 1, a code of the tokens' type
(uint8), numbers of sequences and of document places (uint64 each), then lengths of sequences
(int32), their places in bytes (int64), the first sequence of each document, and the end (int64).
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.core.errors import DataError
from diffllm.core.files import open_regular
from diffllm.data.file_array import FileArray
from diffllm.data.imported.files import LOOKED_AT, TokenFile, array_in, check_last_end

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_megatron(path: Path, vocab_size: int) -> TokenFile:
    """Open NAME.bin, with NAME.idx beside it; raises DataError.

    Args:
        vocab_size: of the tokenizer.
    """
    index = path.with_suffix(".idx")
    try:
        with open_regular(index, 2**63, follow=True) as file:
            head = file.read(HEADER.size)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{index}: {reason}; {path.name} needs its index") from error
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise DataError(f"{index} is no index of Megatron's: it does not begin with MMIDIDX")
    _, version, code, sequences, marks = HEADER.unpack(head)
    if version != 1 or code not in TYPES:
        raise DataError(f"{index}: version {version} with tokens of type {code} is not known")
    at = HEADER.size
    lengths = array_in(index, "<i4", at, sequences)
    places = array_in(index, "<i8", at + lengths.nbytes, sequences)
    firsts = array_in(index, "<i8", at + lengths.nbytes + places.nbytes, marks)
    content = array_in(path, TYPES[code])
    size = content.itemsize
    if not sequences or places[0] or not follow_each_other(places, lengths, size):
        raise DataError(f"{index}: its sequences do not follow each other in {path.name}")
    if len(firsts) < 2 or firsts[0] or int(firsts[-1]) != sequences:
        raise DataError(f"{index}: its documents do not hold all of its {sequences:,} sequences")

    def end_of(document: Any) -> Any:
        last = firsts[document + 1] - 1  # -1 for empty documents at the beginning
        return (places[last] // size + lengths[last]) * (last >= 0)

    check_last_end(index, int(end_of(marks - 2)), len(content))
    return TokenFile(path, content, end_of, marks - 1, vocab_size)


def follow_each_other(places: FileArray, lengths: FileArray, size: int) -> bool:
    """Whether sequences lie behind each other without gaps, as far as many of them show."""
    looked_at = np.unique(np.linspace(0, len(places) - 2, LOOKED_AT).astype(np.int64).clip(0))
    if len(places) == 1:
        return True
    ends = places[looked_at] + lengths[looked_at].astype(np.int64) * size
    return bool((ends == places[looked_at + 1]).all())
