"""Arrays in files, of which a stretch is read at a time.

They are read and not mapped: where a mapped file is cut off, or its disk fails, the kernel ends the
process, and with it what has not been saved.
"""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.core.errors import DataError
from diffllm.core.files import open_regular
from diffllm.data.verified import identity_in


class FileArray:
    """The numbers of a file, (n,), which are read where they are asked for.

    Processes that are forked share the open file and nothing else.
    """

    def __init__(
        self, path: Path, dtype: Any, offset: int = 0, count: int | None = None, advice: str = ""
    ) -> None:
        """Open the file; raises DataError.

        Args:
            offset: bytes before the first number.
            count: how many there are; None: as many as the file holds.
            advice: ends the line that says what is wrong with the file.
        """
        self.path, self.dtype, self.offset, self.advice = path, np.dtype(dtype), offset, advice
        try:
            stream = open_regular(path, 2**63, follow=True)
        except (OSError, ValueError) as error:
            raise self._unusable(getattr(error, "strerror", None) or str(error)) from error
        weakref.finalize(self, stream.close)
        self._file = stream.fileno()
        found = os.fstat(self._file)
        self.identity = identity_in(found)
        """The file's size and times as it was opened: they change when it is written to."""
        self._written = found.st_size, found.st_mtime_ns
        there = max(0, found.st_size - offset) // self.itemsize
        self._count = there if count is None else count

    @property
    def itemsize(self) -> int:
        """The bytes of a number."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all numbers."""
        return self._count * self.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        """Read a number, a slice without steps, (m,), or the numbers at places (m,)."""
        if isinstance(place, slice):
            start, stop, _ = place.indices(self._count)
            return self._read(start, max(start, stop))
        if isinstance(place, np.ndarray):
            least, most = int(place.min(initial=self._count)), int(place.max(initial=0))
            if 0 <= least <= most < min(self._count, least + 64 * len(place)):  # close together
                return self._read(least, most + 1)[place - least]
            return np.array([self[int(i)] for i in place], self.dtype)
        start = place + self._count * (place < 0)
        if not 0 <= start < self._count:
            raise self._unusable(f"place {place} of {self._count}")
        return self._read(start, start + 1)[0]

    def _read(self, start: int, stop: int) -> np.ndarray:
        out = np.empty(stop - start, self.dtype)
        place = self.offset + start * self.itemsize
        try:
            read = os.preadv(self._file, [out.data], place) if len(out) else 0
            while read < out.nbytes:  # a system call reads 2 GiB at most
                more = os.preadv(self._file, [out.view(np.uint8)[read:].data], place + read)
                if not more:
                    raise self._unusable("cut off since it was opened")
                read += more
            now = os.fstat(self._file)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        if (now.st_size, now.st_mtime_ns) != self._written:
            raise self._unusable("changed since it was opened")
        return out

    def _unusable(self, problem: str) -> DataError:
        return DataError(f"{self.path}: {problem}{self.advice}")
