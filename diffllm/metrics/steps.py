"""The file steps.npy: loss, gradient norm, learning rate and costs of every optimizer step.

`numpy.load("steps.npy")["train/loss"]` reads one column. The names are those of metrics.jsonl.
"""

import io
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.core.files import open_regular, readable
from diffllm.metrics.growing_file import GrowingFile

STEP_DTYPE = np.dtype([
    ("step", "<u4"),
    ("tokens", "<i8"),
    ("tokens_per_parameter", "<f8"),
    ("training_flops", "<f8"),
    ("train_seconds", "<f8"),
    ("wall_seconds", "<f8"),
    ("train/lr", "<f8"),
    ("train/loss", "<f4"),
    ("train/grad_norm", "<f4"),
    ("train/skipped", "u1"),
])  # fmt: skip
"""A row of the file: 61 bytes per optimizer step."""
LARGEST_STEPS_FILE = 2**34
"""Maximum bytes of the file, 280 million steps."""


class StepsFile:
    """The file steps.npy of a run.

    `last_step` is the step from which the run resumes, or 0 for a new run. Rows of later steps are
    removed. If writing fails, rows are kept in memory and written later. Raises CheckpointError if
    the file cannot be created, or if the run resumes and the existing file is invalid.
    """

    def __init__(self, path: Path, last_step: int = 0):
        rows = read_steps(path, last_step) if last_step else np.zeros(0, STEP_DTYPE)
        content = header(len(rows)) + rows.tobytes()
        self.file = GrowingFile(path, content, "rows")

    def append(self, rows: np.ndarray) -> None:
        """Append rows (n,) of dtype STEP_DTYPE."""
        for row in rows:
            self.file.append(row.tobytes())
        self._count_rows()

    def close(self) -> None:
        self.file.close()
        self._count_rows()

    def _count_rows(self) -> None:
        """Write the number of rows into the header.

        Until then, readers see the previous rows. Growing the number needs no disk space, because
        numpy pads the header to a constant length.
        """
        rows = (self.file.size - HEADER_SIZE) // STEP_DTYPE.itemsize
        # Not the descriptor of GrowingFile: Linux appends all that is written through it.
        with suppress(OSError), open(self.file.path, "r+b", buffering=0) as stream:
            stream.write(header(rows))


def header(rows: int) -> bytes:
    """Return the bytes of a .npy file before its first row."""
    content = io.BytesIO()
    described = {"descr": STEP_DTYPE.descr, "fortran_order": False, "shape": (rows,)}
    np.lib.format.write_array_header_1_0(content, described)
    return content.getvalue()


HEADER_SIZE = len(header(0))


def read_steps(path: Path, last_step: int | None = None) -> np.ndarray:
    """Read a steps.npy; return its rows up to training step `last_step`, (n,) of dtype STEP_DTYPE.

    If the file does not exist, as in runs of older versions, there are no rows. Rows that are
    incomplete or not yet counted in the header are omitted. Raises CheckpointError for another
    file.
    """
    with readable(path), suppress(FileNotFoundError):
        with open_regular(path, LARGEST_STEPS_FILE) as stream:
            if np.lib.format.read_magic(stream) != (1, 0):
                raise ValueError("is not a steps.npy: has another version of the format")
            try:
                (counted_rows,), _, dtype = np.lib.format.read_array_header_1_0(stream)
            except Exception as error:  # numpy raises many types, such as tokenize.TokenError.
                raise ValueError(f"is not a steps.npy: {error}") from None
            if dtype != STEP_DTYPE:
                raise ValueError(f"is not a steps.npy: has other columns than {STEP_DTYPE.names}")
            file_size = os.fstat(stream.fileno()).st_size
            rows_on_disk = (file_size - stream.tell()) // STEP_DTYPE.itemsize
            # The header of a truncated file counts rows that the file no longer has.
            row_count = min(counted_rows, rows_on_disk)
            rows = np.frombuffer(stream.read(row_count * STEP_DTYPE.itemsize), STEP_DTYPE)
        # Signed, because differences of unsigned integers are never negative.
        increases = np.diff(rows["step"].astype(np.int64))
        if not (increases > 0).all():
            raise ValueError("is damaged: its steps do not increase")
        return rows if last_step is None else rows[rows["step"] <= last_step]
    return np.zeros(0, STEP_DTYPE)


def step_values(rows: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield each row (n,) of dtype STEP_DTYPE as Python numbers by name."""
    names = STEP_DTYPE.names or ()
    for row in rows:
        yield dict(zip(names, row.tolist(), strict=True))
