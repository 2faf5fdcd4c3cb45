"""Arrays on disk: an .npy file of numbers with its SHA-256 at the end, which numpy ignores.

Reading unpickles nothing, bounds memory by the size of the file, and finds every edit.
"""

import hashlib
import io
import os
import re
from math import prod
from pathlib import Path

import numpy as np

from diffllm.core.files import open_regular, replace_file

LARGEST_ARRAY = 2**36
"""Limit in bytes of an array that is read at once."""
HEADER = re.compile(
    rb"\x93NUMPY\x01\0v\0\{'descr': '([<|]\w\d)', 'fortran_order': False, "
    rb"'shape': \((\d*,|\d+(?:, \d+)+)\), \} *\n"
)
"""What numpy writes before an array of numbers in the order of C, padded to HEADER_BYTES."""
HEADER_BYTES, DIGEST_BYTES = 128, 32


def write_array(file: Path, array: np.ndarray) -> None:
    """Write an array that `read_array` reads, in one step."""
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(array))
    stream.write(hashlib.sha256(stream.getbuffer()).digest())
    replace_file(file, stream.getvalue())


def read_array(file: Path, dtype: str, ndim: int = 1) -> np.ndarray:
    """Read an array that `write_array` wrote.

    Raises OSError, or ValueError whose message continues the file's name: for an array of another
    type or another number of dimensions, and for a file that is cut off, too long or edited.
    """
    with open_regular(file, LARGEST_ARRAY) as stream:
        match = HEADER.fullmatch(header := stream.read(HEADER_BYTES))
        if not match:
            raise ValueError("is not an .npy file of numbers")
        shape = tuple(int(size) for size in match[2].decode().split(",") if size)
        if match[1].decode() != dtype or len(shape) != ndim:
            raise ValueError(f"holds {match[1].decode()} of shape {shape}, not {ndim}-D {dtype}")
        size = os.fstat(stream.fileno()).st_size
        expected = HEADER_BYTES + prod(shape) * np.dtype(dtype).itemsize + DIGEST_BYTES
        if size != expected:
            raise ValueError(f"has {size:,} bytes, its header says {expected:,}")
        array = np.fromfile(stream, dtype, prod(shape)).reshape(shape)
        digest = hashlib.sha256(header)
        digest.update(array.data)
        if digest.digest() != stream.read():
            raise ValueError("is damaged: its checksum is not the one at its end")
        return array
