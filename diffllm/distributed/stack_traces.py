"""Stack traces of a process that ends because a rank hangs or is missing."""

import faulthandler
import os
import traceback
from pathlib import Path

from diffllm.core.files import open_to_write
from diffllm.core.printing import echo


def write_traces(
    directory: Path | None, rank: int, heading: str, error: BaseException | None
) -> str:
    """Write `heading`, `error` and the stack traces of all threads to a file in `directory`.

    Return text to append to an error message: `directory`, or why writing the file failed. Return
    "" if `directory` is None.
    """
    if directory is None:
        return ""
    try:
        directory.mkdir(exist_ok=True)
        descriptor = open_to_write(directory / f"rank-{rank:05d}.txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            echo(heading, file=file)
            if error:
                traceback.print_exception(error, file=file)
            # The next call writes to the descriptor directly.
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except Exception as problem:
        return f"; no stack traces: {problem}"
    return f"; stack traces in {directory}"
