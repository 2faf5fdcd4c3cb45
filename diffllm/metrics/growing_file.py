"""A file of a run that grows by records, and that a full disk does not damage."""

import contextlib
import os
from pathlib import Path

from diffllm.core.errors import CheckpointError
from diffllm.core.files import open_to_append, write_atomic
from diffllm.core.printing import to_stderr


class GrowingFile:
    """A file to which records are appended, such as lines of metrics.jsonl.

    The file contains only complete records. If writing fails, for example on a full disk, records
    are kept in memory and written later.

    Args:
        path: the file; an existing file is replaced atomically.
        content: bytes at the start of the file.
        unit: plural name of the records, for messages, such as "lines".

    Raises CheckpointError if the file cannot be created.
    """

    def __init__(self, path: Path, content: bytes, unit: str):
        write_atomic(path, content)
        self.path, self.unit = path, unit
        try:
            self.file = os.fdopen(open_to_append(path), "ab", buffering=0)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
        self.size = len(content)
        self.waiting: list[bytes] = []

    def append(self, record: bytes) -> None:
        # One warning for a full disk, not one per record.
        already_warned = bool(self.waiting)
        self.waiting.append(record)
        problem = self._write_waiting()
        if problem and not already_warned:
            to_stderr(
                f"warning: cannot write {self.path}, {self.unit} are kept in memory: {problem}"
            )

    def _write_waiting(self) -> str | None:
        """Write the records kept in memory; return the reason if writing fails, otherwise None."""
        while self.waiting:
            record = self.waiting[0]
            end = self.size
            try:
                # Other processes may have appended records, such as stalls of other ranks.
                end = os.fstat(self.file.fileno()).st_size
                if self.file.write(record) != len(record):
                    raise OSError("the file system took only a part; free some disk space")
            except OSError as error:
                # Remove an incomplete record, so that readers find only complete ones.
                with contextlib.suppress(OSError):
                    self.file.truncate(end)
                return error.strerror or str(error)
            self.size += len(record)
            self.waiting.pop(0)
        return None

    def close(self) -> None:
        """Try again to write the records kept in memory, then close the file."""
        problem = self._write_waiting()
        if problem:
            lost = len(self.waiting)
            to_stderr(
                f"warning: the last {lost} {self.unit} of {self.path} were not written: {problem}"
            )
        self.file.close()
