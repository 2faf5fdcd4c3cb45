"""Local files as a corpus."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffllm.data.config import DataConfig
from diffllm.data.path_names import names_of
from diffllm.data.text.corpus import Corpus, Part, TextBatch, columns_of, reason
from diffllm.data.text.file_index import FileFacts, combined_hash, file_facts
from diffllm.data.text.formats import COMPRESSIONS, format_of
from diffllm.errors import DataError
from diffllm.registry import source

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

    contents = [[facts.sha256, form] for facts, form in zip(facts, formats, strict=True)]
    return Corpus(
        description=f"{len(paths)} file{'s'[: len(paths) > 1]}: {names_of(paths)}",
        identity=combined_hash(["files", cfg.text_column, cfg.sample_by.value, contents]),
        list_parts=lambda: parts_of(paths, facts, formats, cfg),
    )


@dataclass(frozen=True)
class FilesPart:
    """Slices of files, one behind the other."""

    slices: tuple["Slice", ...]

    @property
    def name(self) -> str:
        """The first of the files."""
        return str(self.slices[0].path) + " and others" * (len(self.slices) > 1)

    @property
    def size(self) -> int:
        """About how many bytes of text it has."""
        return sum(part.size for part in self.slices)

    def read(self) -> Iterator[TextBatch]:
        """Yield the documents; raises DataError, which names a file that cannot be read, or is no
        longer what it was when it was hashed."""
        for part in self.slices:
            try:
                check_unchanged(part)
                yield from part.read()
                check_unchanged(part)
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


def check_unchanged(part: "Slice") -> None:
    """Raise DataError for a file that has been written to since it was hashed."""
    stat = part.path.stat()
    if (stat.st_size, stat.st_mtime_ns) != (part.facts.size, part.facts.mtime_ns):
        raise DataError(f"{part.path}: changed while it was prepared; start again")


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error that names a file which cannot be read."""
    packed = COMPRESSIONS.get(path.suffix.lower())
    broken = packed and isinstance(error, OSError) and not error.errno
    what = f"not a whole {packed} file: " if broken else ""
    return DataError(f"{path}: {what}{reason(error)}")


def expand(pattern: str) -> list[Path]:
    """Return the file of that name, or the files that a glob finds, sorted."""
    path = Path(pattern).expanduser().absolute()
    if path.is_file():
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    files = [path for path in found if path.is_file()]
    if not files:
        what = "is a directory; name its files, for example with *.parquet" * path.is_dir()
        raise DataError(f"data.paths: {pattern} {what or 'matches no file'}")
    return files


def check_readable(path: Path, facts: FileFacts) -> None:
    """Raise DataError for a file without content, or of text that is not UTF-8."""
    if facts.is_blank:
        raise DataError(f"{path}: the file is empty")
    if path.suffix.lower() in (".jsonl", ".json", ".txt") and not facts.is_utf8:
        raise DataError(f"{path}: not UTF-8 text")
