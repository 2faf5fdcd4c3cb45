"""Skipped files of a corpus: the first are printed, and all are listed in a file of the cache."""

from contextlib import suppress
from pathlib import Path

from diffllm.core.errors import listed, printable
from diffllm.core.files import read_text, replace_file
from diffllm.core.printing import to_stderr

SKIPPED = "skipped.txt"
LARGEST = 2**30
PRINTED = 10
EMPTY, HIDDEN = "the file is empty", "hidden"

Skipped = dict[Path, str]
"""Reasons by path of the skipped file or directory."""


def reasons_text(skipped: Skipped) -> str:
    return listed([f"{path.name}: {reason}" for path, reason in skipped.items()])


def report_skipped(skipped: Skipped, directory: Path, final: Path) -> None:
    """Write the skipped files to a file in `directory`, and print the first ten on stderr.

    Do nothing if the file lists the same paths and reasons, so that later runs and other ranks do
    not repeat the messages. `final` is the later path of `directory`.
    """
    lines = [f"{printable(str(path))}: {reason}" for path, reason in skipped.items()]
    content = "".join(f"{line}\n" for line in lines)
    stored = ""
    with suppress(OSError, ValueError):
        stored = read_text(directory / SKIPPED, LARGEST)
    if content == stored:
        return
    place = ""
    with suppress(OSError):  # the cache may be read-only
        replace_file(directory / SKIPPED, content)
        place = f", listed in {final / SKIPPED}"
    if not lines:
        return
    to_stderr(f"{counted(len(lines))}{place}; to read a file, add its own path to data.paths")
    for line in lines[:PRINTED]:
        to_stderr(f"skipped {line}")
    if len(lines) > PRINTED:
        to_stderr(f"skipped {len(lines) - PRINTED:,} more")


def skipped_text(directory: Path) -> str:
    """Return the number of skipped files of a prepared corpus, or "" if no file was skipped."""
    file = directory / SKIPPED
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = read_text(file, LARGEST).splitlines()
    return f"{counted(len(lines))}, listed in {file}" if lines else ""


def counted(number: int) -> str:
    return f"data.paths: skipped {number:,} {'entry' if number == 1 else 'entries'} of directories"
