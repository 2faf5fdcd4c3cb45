"""Use local files as a corpus."""

import codecs
import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
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
    TOKEN_FILES,
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
    """Open the files, directories and glob patterns in `cfg.paths` as a corpus.

    Raises DataError if a file in `cfg.paths` cannot be used, or if no file contains text.
    """
    paths, hidden = paths_of(cfg)
    supported = [path for path in paths if format_of(path)]
    facts = dict(zip(supported, file_facts(supported, cache_dir), strict=True))
    problems = {path: problem_of(path, facts.get(path), cfg) for path in paths}
    for path, root in paths.items():
        if problems[path] and root is None:
            raise DataError(f"{path} cannot be used as text: {problems[path]}")
        if root and path.suffix == ".json" and not contains_rows(path, cfg.text_column):
            problems[path] = "no rows of text"  # such as package.json
    kept = {path: each for path, each in facts.items() if not problems[path]}
    check_columns_exist(cfg, list(kept), list(problems.values()))
    tokens = any(path.suffix in TOKEN_FILES for path in paths)
    if not kept or (tokens and all(path.suffix == ".json" for path in kept)):
        hint = "; data=tokens reads its token files" * tokens
        named = ", ".join(map(str, cfg.paths[:3]))
        raise DataError(f"data.paths={named} has no text file, .parquet file or .jsonl file{hint}")
    empty = sum(each.is_blank for each in facts.values())
    contents = []
    for path, of_file in kept.items():
        form = format_of(path)
        # Older versions kept the byte order mark, so they use a different hash.
        marked = " behind a mark" * (form == "text" and begins_with_mark(path))
        contents.append([of_file.sha256, f"{form}{marked}"])
    return Corpus(
        description=description_of({path: paths[path] for path in kept}),
        identity=combined_hash(["files", cfg.text_column, cfg.sample_by.value, contents]),
        list_parts=lambda: parts_of(kept, cfg),
        check=partial(check_all, kept),
        skipped_empty=empty,
        skipped_undecodable=len(paths) - len(kept) - empty + hidden,
    )


def description_of(paths: Mapping[Path, Path | None]) -> str:
    names = dict.fromkeys(f"{root.name}/" if root else path.name for path, root in paths.items())
    link = ":" if None in paths.values() else " in"
    return f"{len(paths)} file{'s'[: len(paths) > 1]}{link} {names_of([*names])}"


def problem_of(path: Path, facts: FileFacts | None, cfg: DataConfig) -> str:
    """Return the reason why a file cannot be used as text, or "" if the file can be used.

    `facts` is None if the file format is unsupported.
    """
    form = format_of(path)
    if not facts:
        formats = ", ".join(TEXT_FORMATS)
        known = f".parquet, {formats} (also compressed) and other text"
        return f"unsupported format; data=files reads {known}, data=tokens .bin and .ds"
    if facts.is_blank:
        return "the file is empty"
    if form != "parquet" and path.suffix.lower() not in COMPRESSIONS and not facts.is_utf8:
        return "not UTF-8 text"
    if form == "text" and cfg.prompt_column:
        return without_columns("prompt_column", cfg.prompt_column)
    return ""


def without_columns(key: str, column: str) -> str:
    return (
        f"data.{key}={column} needs files with columns, such as .parquet or .jsonl, and plain text "
        f"has no columns; remove data.{key}"
    )


def check_columns_exist(cfg: DataConfig, paths: Sequence[Path], problems: Sequence[str]) -> None:
    """Raise DataError if `cfg` names a column, but only plain text remains as text of the corpus.

    `paths` are the usable files, and `problems` the results of `problem_of` for all files.
    """
    if paths and all(format_of(path) == "text" for path in paths):
        if cfg.text_column != DataConfig.text_column:
            raise DataError(without_columns("text_column", cfg.text_column))
    elif not paths and cfg.prompt_column:
        problem = without_columns("prompt_column", cfg.prompt_column)
        if problem in problems:
            raise DataError(problem)


def contains_rows(path: Path, column: str) -> bool:
    """Return whether the first line of a .json file suggests that the file contains rows.

    The line must begin with "[" (the rest is not checked), or be a JSON object with the key
    `column`. Other lines are not read.
    """
    with path.open("rb") as file, suppress(ValueError):
        line = file.readline().lstrip()
        row = [] if line[:1] == b"[" else json.loads(line)
        return isinstance(row, list) or (isinstance(row, dict) and column in row)
    return False


def read_slices(slices: Sequence["Slice"]) -> Iterator[TextBatch]:
    for part in slices:
        with naming(part.path):
            check_unchanged(part.path, part.facts)
            yield from part.read(part)
            check_unchanged(part.path, part.facts)


def parts_of(facts: Mapping[Path, FileFacts], cfg: DataConfig) -> list[Part]:
    """Divide files into parts of a corpus, which separate processes can read.

    The minimum size of a part is the larger of 32 MB and 1/4096 of the total size. Only the last
    part may be smaller. Raises DataError for an unreadable file.
    """
    from diffllm.data.text.readers import slices_of

    least = max(PART_BYTES, sum(each.size for each in facts.values()) // MOST_PARTS)
    groups: list[list[Slice]] = []
    size = least
    for path, of_file in facts.items():
        with naming(path):
            slices = list(slices_of(path, of_file, format_of(path), cfg, least))
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


def check_all(facts: Mapping[Path, FileFacts]) -> None:
    for path, of_file in facts.items():
        with naming(path):
            check_unchanged(path, of_file)


@contextmanager
def naming(source: Path | str) -> Iterator[None]:
    """Convert any error except DataError in a `with` block to a DataError that names `source`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        packed = COMPRESSIONS.get(os.path.splitext(source)[1].lower())
        broken = packed and isinstance(error, OSError) and not error.errno
        done = f"decompressed as {packed}" if broken else "read"
        raise DataError(f"{source} cannot be {done}: {reason(error)}") from error


def paths_of(cfg: DataConfig) -> tuple[dict[Path, Path | None], int]:
    """Find the files for `cfg.paths`, a list of files, directories and glob patterns.

    Return a dict, and the number of skipped hidden files and hidden subdirectories. The keys of the
    dict are the files. If `cfg.paths` lists or matches the file itself, its value is None.
    Otherwise, its value is the listed or matched directory in which the file was found. If a glob
    pattern matches files and directories, the directories are ignored. Raises DataError if an entry
    of `cfg.paths` matches nothing.
    """
    found: dict[Path, Path | None] = {}
    all_hidden = 0
    for pattern in cfg.paths:
        path = Path(pattern).expanduser().absolute()
        exists = os.path.lexists(path)
        names = [path] if exists else sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not names:
            near = similar_path(Path(pattern), os.path.exists)
            raise DataError(f"data.paths: {pattern} matches no file or directory{near}")
        paths = [each for each in names if not each.is_dir()]
        for each in paths:  # refuse pipes and sockets, which could block
            with usable(each), open_regular(each, 2**63, follow=True):
                found[each] = None
        for root in () if paths else names:
            below, hidden = files_below(root)
            found |= {each: root for each in below if each not in found}
            all_hidden += hidden
    return found, all_hidden


def files_below(root: Path) -> tuple[list[Path], int]:
    """Return the regular files below a directory, and the number of skipped hidden entries.

    Hidden files and hidden subdirectories are skipped. The files are sorted by relative path. Links
    are followed, but no directory is searched twice.
    """
    files: list[Path] = []
    hidden, seen = 0, {os.path.realpath(root)}
    for directory, subdirectories, names in os.walk(root, onerror=unreadable, followlinks=True):
        hidden += sum(name.startswith(".") for name in (*subdirectories, *names))
        targets = {
            os.path.realpath(os.path.join(directory, name)): name
            for name in sorted(subdirectories, reverse=True)
            if not name.startswith(".")
        }
        subdirectories[:] = sorted(targets[target] for target in targets.keys() - seen)
        seen |= targets.keys()
        paths = (Path(directory, name) for name in names if not name.startswith("."))
        files += filter(Path.is_file, paths)
    return sorted(files, key=lambda path: path.relative_to(root).as_posix()), hidden


def unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


def begins_with_mark(path: Path) -> bool:
    """Return whether a file begins with a byte order mark; False if the file is unreadable."""
    from diffllm.data.text.readers import unpacked

    with suppress(OSError, ValueError), unpacked(path) as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    return False
