"""Local files as a corpus."""

import codecs
import glob
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diffllm.core.errors import DataError, printable
from diffllm.core.registry import source
from diffllm.data.config import DataConfig
from diffllm.data.path_names import names_of
from diffllm.data.text.corpus import Corpus, Part, TextBatch, columns_of, reason
from diffllm.data.text.file_index import FileFacts, check_unchanged, combined_hash, file_facts
from diffllm.data.text.formats import COMPRESSIONS, TEXT_FORMATS, format_of

if TYPE_CHECKING:
    from diffllm.data.text.readers import Slice

PART_BYTES = 32_000_000
"""Bytes of text of a part of a small corpus."""
MOST_PARTS = 4096
"""Parts of a large one, about."""


@source("files")
def files(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the files that data.paths names; raises DataError."""
    paths = list(dict.fromkeys(path for pattern in cfg.paths for path in expand(pattern)))
    formats = [format_of(path) for path in paths]
    facts = file_facts(paths, cache_dir)
    for path, form, facts_of_file in zip(paths, formats, facts, strict=True):
        check_readable(path, facts_of_file)
        if form == "text" and cfg.prompt_column:
            raise DataError(f"{path}: a text has no columns, which data.prompt_column needs")

    # A mark was once part of its text: tokens of that time are another corpus's.
    read_as = [
        f"{form} behind a mark" if form == "text" and begins_with_mark(path) else form
        for path, form in zip(paths, formats, strict=True)
    ]
    contents = [[facts.sha256, form] for facts, form in zip(facts, read_as, strict=True)]
    return Corpus(
        description=f"{len(paths)} file{'s'[: len(paths) > 1]}: {names_of(paths)}",
        identity=combined_hash(["files", cfg.text_column, cfg.sample_by.value, contents]),
        list_parts=lambda: parts_of(paths, facts, formats, cfg),
        check=partial(check_all, paths, facts),
        place=combined_hash([*map(str, paths), cfg.text_column, cfg.sample_by.value]),
    )


@dataclass(frozen=True)
class FilesPart:
    """Slices of files, one behind the other."""

    slices: tuple["Slice", ...]

    @property
    def name(self) -> str:
        """The first of the files."""
        return printable(str(self.slices[0].path)) + " and others" * (len(self.slices) > 1)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.slices)

    def read(self) -> Iterator[TextBatch]:
        """Yield the documents; raises DataError, which names a file that cannot be read, or is no
        longer what it was when it was hashed."""
        for part in self.slices:
            try:
                check_unchanged(part.path, part.facts)
                yield from part.read()
                check_unchanged(part.path, part.facts)
            except DataError:
                raise
            except Exception as error:
                raise unreadable(part.path, error) from error


def parts_of(
    paths: Sequence[Path], facts: Sequence[FileFacts], formats: Sequence[str], cfg: DataConfig
) -> list[Part]:
    """Divide files into parts of a size that follows from that of all; raises DataError."""
    from diffllm.data.text.readers import slices_of

    total = sum(each.size for each in facts)
    least = max(PART_BYTES, total // MOST_PARTS)
    parts: list[Part] = []
    collected: list[Slice] = []
    size = 0
    columns, several = tuple(columns_of(cfg)), len(paths) > 1
    for path, of_file, form in zip(paths, facts, formats, strict=True):
        try:
            slices = list(slices_of(path, of_file, form, cfg.sample_by, columns, least, several))
        except DataError:
            raise
        except Exception as error:
            raise unreadable(path, error) from error
        for part in slices:
            collected.append(part)
            size += part.size
            if size >= least:
                parts.append(FilesPart(tuple(collected)))
                collected, size = [], 0
    return [*parts, FilesPart(tuple(collected))] if collected else parts


def check_all(paths: Sequence[Path], facts: Sequence[FileFacts]) -> None:
    """Raise DataError unless all files are what they were when they were hashed."""
    for path, of_file in zip(paths, facts, strict=True):
        try:
            check_unchanged(path, of_file)
        except OSError as error:
            raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error that names a file which cannot be read."""
    packed = COMPRESSIONS.get(path.suffix.lower())
    broken = packed and isinstance(error, OSError) and not error.errno
    what = f"not a whole {packed} file: " if broken else ""
    return DataError(f"{path}: {what}{reason(error)}")


def expand(pattern: str) -> list[Path]:
    """Return the file of that name, or the files that a glob finds, sorted; raises DataError where
    there is none, or something that is neither a file nor a directory."""
    path = Path(pattern).expanduser().absolute()
    if os.path.lexists(path):
        if path.is_dir():
            raise DataError(
                f"data.paths: {pattern} is a directory; name its files, for example with *.parquet"
            )
        check_file(path)
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    files = [path for path in found if not path.is_dir()]
    if not files:
        raise DataError(f"data.paths: {pattern} matches no file")
    for file in files:
        check_file(file)
    return files


def begins_with_mark(path: Path) -> bool:
    """Whether a text begins with a byte order mark; False for one that cannot be read."""
    with suppress(OSError, ValueError):
        if path.suffix.lower() in COMPRESSIONS:
            from diffllm.data.text.readers import opened

            file = opened(path)
        else:
            file = path.open("rb")
        with file:
            return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    return False


def check_file(path: Path) -> None:
    """Raise DataError for what is no file: a link that leads nowhere, a pipe or a socket, which
    could be waited for in vain."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        broken = ", a link that leads nowhere" * path.is_symlink()
        raise DataError(f"{path}: {error.strerror}{broken}") from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise DataError(f"{path}: {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file")


def check_readable(path: Path, facts: FileFacts) -> None:
    """Raise DataError for a file without content, or of text that is not UTF-8."""
    if facts.is_blank:
        raise DataError(f"{path}: the file is empty")
    if path.suffix.lower() in TEXT_FORMATS and not facts.is_utf8:
        raise DataError(f"{path}: not UTF-8 text")
