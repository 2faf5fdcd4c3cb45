"""Local files as a corpus."""

import codecs
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diffllm.core.errors import DataError, printable
from diffllm.core.files import open_regular, similar_path
from diffllm.core.registry import source
from diffllm.data.config import DataConfig
from diffllm.data.text.corpus import Corpus, Part, TextBatch, reason
from diffllm.data.text.file_index import (
    COMPRESSIONS,
    TEXT_FORMATS,
    FileFacts,
    check_unchanged,
    combined_hash,
    file_facts,
    format_of,
    names_of,
)
from diffllm.data.verified import usable

if TYPE_CHECKING:
    from diffllm.data.text.readers import Slice

PART_BYTES = 32_000_000
"""Bytes of text per part of a small corpus."""
MOST_PARTS = 4096


@source("files")
def files(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the files that data.paths names; raises DataError."""
    paths = paths_of(cfg)
    formats = [format_of(path) for path in paths]
    facts = file_facts(paths, cache_dir)
    contents = []
    for path, form, of_file in zip(paths, formats, facts, strict=True):
        if of_file.is_blank:
            raise DataError(f"{path}: the file is empty")
        if path.suffix.lower() in TEXT_FORMATS and not of_file.is_utf8:
            raise DataError(f"{path}: not UTF-8 text")
        if form == "text" and cfg.prompt_column:
            raise DataError(f"{path}: a text has no columns, which data.prompt_column needs")
        # Older versions kept the byte order mark, so they use a different hash.
        marked = " behind a mark" * (form == "text" and begins_with_mark(path))
        contents.append([of_file.sha256, f"{form}{marked}"])
    return Corpus(
        description=f"{len(paths)} file{'s'[: len(paths) > 1]}: {names_of(paths)}",
        identity=combined_hash(["files", cfg.text_column, cfg.sample_by.value, contents]),
        list_parts=lambda: parts_of(paths, facts, formats, cfg),
        check=partial(check_all, paths, facts),
    )


def read_slices(slices: Sequence["Slice"]) -> Iterator[TextBatch]:
    for part in slices:
        with naming(part.path):
            check_unchanged(part.path, part.facts)
            yield from part.read(part)
            check_unchanged(part.path, part.facts)


def parts_of(
    paths: Sequence[Path], facts: Sequence[FileFacts], formats: Sequence[str], cfg: DataConfig
) -> list[Part]:
    """Divide files into parts of a size that follows from the total; raises DataError."""
    from diffllm.data.text.readers import slices_of

    least = max(PART_BYTES, sum(each.size for each in facts) // MOST_PARTS)
    groups: list[list[Slice]] = []
    size = least
    for path, of_file, form in zip(paths, facts, formats, strict=True):
        with naming(path):
            slices = list(slices_of(path, of_file, form, cfg, least))
        for part in slices:
            if size >= least:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part.size
    parts = []
    for group in groups:
        name = printable(str(group[0].path)) + " and others" * (len(group) > 1)
        parts.append(Part(name, sum(each.size for each in group), partial(read_slices, group)))
    return parts


def check_all(paths: Sequence[Path], facts: Sequence[FileFacts]) -> None:
    for path, of_file in zip(paths, facts, strict=True):
        with naming(path):
            check_unchanged(path, of_file)


@contextmanager
def naming(source: Path | str) -> Iterator[None]:
    """Turn every error of the block into a DataError that names the file or data set."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        packed = COMPRESSIONS.get(os.path.splitext(source)[1].lower())
        broken = packed and isinstance(error, OSError) and not error.errno
        what = f"cannot be unpacked as {packed}: " if broken else ""
        raise DataError(f"{source}: {what}{reason(error)}") from error


def paths_of(cfg: DataConfig) -> list[Path]:
    """List the files of data.paths once each, sorted within a glob; raises DataError."""
    found: dict[Path, None] = {}
    for pattern in cfg.paths:
        path = Path(pattern).expanduser().absolute()
        exists = os.path.lexists(path)
        names = [path] if exists else sorted(map(Path, glob.glob(str(path), recursive=True)))
        paths = [each for each in names if not each.is_dir()]
        if not paths:
            raise DataError(
                f"data.paths: {pattern} matches no file; of a directory name the files, such as "
                f"DIRECTORY/*.parquet{similar_path(Path(pattern), os.path.isfile)}"
            )
        for each in paths:  # reading a pipe or a socket could block
            with usable(each), open_regular(each, 2**63, follow=True):
                found[each] = None
    return list(found)


def begins_with_mark(path: Path) -> bool:
    """Whether a readable text begins with a byte order mark."""
    from diffllm.data.text.readers import unpacked

    with suppress(OSError, ValueError), unpacked(path) as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    return False
