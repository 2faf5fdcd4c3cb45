"""Reading .npy files that may come from anywhere."""

import os
from pathlib import Path

import numpy as np
import pytest

from diffllm.data.preparation.arrays import read_array, write_array


@pytest.mark.parametrize("shape", [(0,), (3,), (123_456,), (2, 0), (2, 5)])
@pytest.mark.parametrize("dtype", ["<u8", "<i8", "<f4", "|u1"])
def test_read_array_returns_what_was_written(
    tmp_path: Path, shape: tuple[int, ...], dtype: str
) -> None:
    saved = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    write_array(tmp_path / "a.npy", saved)
    assert np.array_equal(np.load(tmp_path / "a.npy"), saved)
    found = read_array(tmp_path / "a.npy", dtype, len(shape))
    assert found.dtype == saved.dtype
    assert np.array_equal(found, saved)


def header(descr: str, shape: str) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00\x76\x00" + text.encode().ljust(117) + b"\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an .npy file"),
        (b"\x80\x04K\x01.", "is not an .npy file"),
        (header("|O", "(1,)") + b"\x80\x04K\x01.", "holds |O of shape|is not an .npy file"),
        (header("<u8", "(1000000000000,)"), "its header says 8,000,000,000,160"),
        (header("<u8", f"({'9' * 40},)"), "its header says"),
        (header("<u8", "(1,)") + bytes(39), "has 167 bytes, its header says 168"),
        (header("<u8", "(1,)") + bytes(41), "has 169 bytes, its header says 168"),
        (header("<u8", "(1,)") + bytes(40), "its checksum is not the one at its end"),
        (header("<i8", "(1,)") + bytes(8), r"holds <i8 of shape \(1,\), not 1-D <u8"),
        (header("<u8", "(1, 1)") + bytes(8), r"holds <u8 of shape \(1, 1\), not 1-D <u8"),
    ],
)
def test_read_array_refuses_a_damaged_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_array(tmp_path / "a.npy", "<u8")


def test_read_array_refuses_a_fifo_and_a_sparse_terabyte(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_array(tmp_path / "fifo", "<u8")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 2**40)
    with pytest.raises(ValueError, match="has 1,099,511,627,776 bytes, more than"):
        read_array(tmp_path / "sparse", "<u8")
