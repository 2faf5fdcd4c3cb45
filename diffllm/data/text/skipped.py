"""Skipped files of a corpus: the first are printed, and all are listed in a file of the cache."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from diffllm.core.errors import listed, printable
from diffllm.core.files import locked, read_text, replace_file
from diffllm.core.printing import to_stderr

SKIPPED = "skipped.txt"
LARGEST_LIST = 2**30
PRINTED = 10
EMPTY, HIDDEN, NOT_REGULAR = "the file is empty", "hidden", "not a regular file"
OTHER_KIND = re.compile(r"; of .*/, only .* is read \(")

Skipped = dict[Path, str]
"""Reasons by path of the skipped file or directory."""


def reasons_text(skipped: Skipped) -> str:
    return listed([f"{path.name}: {reason}" for path, reason in skipped.items()])


def other_kind(kind: str, directory: Path, chosen: str, size: int, total: int) -> str:
    """Return the reason of a skipped file that matches OTHER_KIND."""
    return f"{kind}; of {directory.name}/, only {chosen} is read ({size:,} of {total:,} bytes)"


def report_skipped(skipped: Skipped, directory: Path, final: Path) -> None:
    """Write the skipped files to a file in `directory`, and print the first ten on stderr.

    Do nothing if the file lists the same paths and reasons, so that later runs do not repeat the
    messages. `final` is the later path of `directory`. Raises OSError if the file cannot be
    written.
    """
    lines = lines_of(skipped)
    if lines == stored_lines(directory):
        return
    replace_file(directory / SKIPPED, "".join(f"{line}\n" for line in lines))
    if not lines:
        return
    place = f"listed in {final / SKIPPED}"
    to_stderr(f"{counted(len(lines))}, {place}; to read a file, add its own path to data.paths")
    for line in lines[:PRINTED]:
        to_stderr(f"skipped {line}")
    if len(lines) > PRINTED:
        to_stderr(f"skipped {len(lines) - PRINTED:,} more")


def report_again(skipped: Skipped, directory: Path) -> None:
    """Call `report_skipped` for a prepared corpus, whose skipped files may have changed.

    Of several processes, such as the ranks of a run, only the first prints messages. Nothing is
    printed if the cache is read-only, because every run would repeat the messages.
    """
    if lines_of(skipped) != stored_lines(directory):
        with suppress(OSError), locked(Path(f"{directory}.lock")):
            # Compares the lists again: another process may have held the lock before.
            report_skipped(skipped, directory, directory)


def lines_of(skipped: Skipped) -> list[str]:
    return [f"{printable(str(path))}: {reason}" for path, reason in skipped.items()]


def stored_lines(directory: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return read_text(directory / SKIPPED, LARGEST_LIST).splitlines()
    return []


def skipped_text(directory: Path) -> str:
    """Return the number of skipped files of a prepared corpus, or "" if no file was skipped."""
    lines = stored_lines(directory)
    return f"{counted(len(lines))}, listed in {directory / SKIPPED}" if lines else ""


def rule_text(directories: Sequence[Path]) -> str:
    """Explain why a corpus may differ from that of older versions, which read all kinds of files.

    `directories` contain the prepared tokens. Return "" if no list of skipped files contains a file
    of another kind.
    """
    for directory in directories:
        if any(OTHER_KIND.search(line) for line in stored_lines(directory)):
            return (
                "; older versions read all kinds of files in a directory, this version only one: "
                f"see {directory / SKIPPED}"
            )
    return ""


def counted(number: int) -> str:
    return f"data.paths: skipped {number:,} {'entry' if number == 1 else 'entries'} of directories"
