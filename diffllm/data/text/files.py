"""Use local files as a corpus."""

import codecs
import glob
import os
from collections import Counter
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
    ending_of,
    file_facts,
    format_of,
    names_of,
)
from diffllm.data.text.skipped import EMPTY, HIDDEN, Skipped, reasons_text
from diffllm.data.verified import usable

if TYPE_CHECKING:
    from diffllm.data.text.readers import Slice

KINDS = {"parquet": "parquet", "json": "JSON", "text": "plain text"}
"""Kinds of files by format. If kinds of a directory have equal size, the first kind is read."""
PART_BYTES = 32_000_000
"""Bytes of text per part of a small corpus."""
MOST_PARTS = 4096


@source("files")
def files(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the files, directories and glob patterns in `cfg.paths` as a corpus.

    Of each directory, only one kind of file is read: the kind with the most bytes. The other files
    of a directory are skipped, see `Corpus.skipped`. Raises DataError if a file in `cfg.paths`
    cannot be used, or if no file contains text.
    """
    roots, left_out = paths_of(cfg)
    supported = [path for path in roots if format_of(path)]
    facts = dict(zip(supported, file_facts(supported, cache_dir), strict=True))
    problems = problems_of(roots, facts, cfg)
    usable_facts = {path: facts[path] for path in supported if path not in problems}
    other = other_kinds(usable_facts, roots, cfg)
    kept = {path: usable_facts[path] for path in usable_facts if path not in other}
    check_columns_exist(cfg, list(kept), list(problems.values()))
    skipped = {**other, **problems, **left_out}
    # Only the first reasons are printed; empty and hidden files are the least surprising ones.
    skipped = dict(sorted(skipped.items(), key=lambda item: item[1] in (EMPTY, HIDDEN)))
    tokens = any(path.suffix in TOKEN_FILES for path in roots)
    if not kept or (tokens and all(path.suffix == ".json" for path in kept)):
        hint = "; data=tokens reads its token files" if tokens else ""
        reasons = f"; skipped {reasons_text(skipped)}" if skipped else ""
        named = ", ".join(map(str, cfg.paths[:3]))
        raise DataError(
            f"data.paths={named} has no text file, .parquet file or .jsonl file{hint}{reasons}"
        )
    contents = []
    for path, of_file in kept.items():
        form = format_of(path)
        # Older versions kept the byte order mark, so they use a different hash.
        marked = " behind a mark" * (form == "text" and begins_with_mark(path))
        contents.append([of_file.sha256, f"{form}{marked}"])
    empty = sum(problem == EMPTY for problem in skipped.values())
    return Corpus(
        description=description_of({path: roots[path] for path in kept}),
        identity=combined_hash(["files", cfg.text_column, cfg.sample_by.value, contents]),
        list_parts=lambda: parts_of(kept, cfg),
        check=partial(check_all, kept),
        skipped_empty=empty,
        skipped_undecodable=len(skipped) - empty,
        skipped=skipped,
    )


def description_of(roots: Mapping[Path, Path | None]) -> str:
    """Describe the files of a corpus, such as "2 parquet files in corpus/" or "1 file: a.txt"."""
    names = dict.fromkeys(f"{root.name}/" if root else path.name for path, root in roots.items())
    files_word = "file" if len(roots) == 1 else "files"
    kinds = {format_of(path) for path in roots}
    if None in roots.values() or len(kinds) > 1:
        link = ":" if None in roots.values() else " in"
        return f"{len(roots)} {files_word}{link} {names_of([*names])}"
    return f"{len(roots)} {KINDS[kinds.pop()]} {files_word} in {names_of([*names])}"


def problems_of(
    roots: Mapping[Path, Path | None], facts: Mapping[Path, FileFacts], cfg: DataConfig
) -> Skipped:
    """Return the unusable files of directories with reasons.

    `facts` contains the files of a supported format. Raises DataError for an unusable file with the
    root None.
    """
    problems = {}
    for path, root in roots.items():
        problem = problem_of(path, facts.get(path), cfg)
        if problem and root is None:
            raise DataError(f"{path} cannot be used as text: {problem}")
        if root and not problem and ending_of(path) == ".json":
            problem = rows_problem(path, cfg.text_column)  # such as package.json
        if problem:
            problems[path] = problem
    return problems


def other_kinds(
    facts: Mapping[Path, FileFacts], roots: Mapping[Path, Path | None], cfg: DataConfig
) -> Skipped:
    """Return the usable files that are not of the kind that is read from their directory.

    Of a directory, the kind with the most bytes on disk is read. Plain text is not read if `cfg`
    names a text column and the directory contains files with columns. Files with the root None are
    always read.
    """
    sizes: dict[Path, Counter[str]] = {}
    for path, of_file in facts.items():
        root = roots[path]
        if root is not None:
            sizes.setdefault(root, Counter())[format_of(path)] += of_file.size
    skipped = {}
    for path in facts:
        root, kind = roots[path], format_of(path)
        if root is None:
            continue
        by_kind = sizes[root]
        candidates = [name for name in KINDS if name in by_kind]
        if cfg.text_column != DataConfig.text_column and len(candidates) > 1:
            candidates = [name for name in candidates if name != "text"]
        chosen = max(candidates, key=by_kind.__getitem__)
        if kind != chosen:
            skipped[path] = (
                f"{KINDS[kind]}; of {root.name}/, only {KINDS[chosen]} is read "
                f"({by_kind[chosen]:,} of {by_kind.total():,} bytes)"
            )
    return skipped


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
        return EMPTY
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


def rows_problem(path: Path, column: str) -> str:
    """Return the reason why a .json file has no rows of text, or "" if the file has such rows.

    An array is not read, because reading it as a corpus raises an error for wrong rows. Otherwise
    the lines are read up to the first row with the key `column`. Raises DataError for an unreadable
    file.
    """
    from diffllm.data.text.readers import begins_with, json_rows

    columns: dict[str, None] = {}
    with naming(path):
        if begins_with(path) == b"[":
            return ""
        try:
            for row in json_rows(path):
                if column in row:
                    return ""
                columns |= dict.fromkeys(row)
        except (ValueError, RecursionError):
            return "neither an array nor a JSON object per line"
    return f"no row has data.text_column={column} (columns: {names_of(list(columns))})"


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


def paths_of(cfg: DataConfig) -> tuple[dict[Path, Path | None], Skipped]:
    """Find the files for `cfg.paths`, a list of files, directories and glob patterns.

    Return a dict, and the skipped entries of directories. The keys of the dict are the files. If
    `cfg.paths` lists or matches the file itself, its value is None. Otherwise, its value is the
    listed or matched directory in which the file was found; of nested directories, the innermost.
    If a glob pattern matches files and directories, the directories are skipped. Raises DataError
    if an entry of `cfg.paths` matches nothing.
    """
    roots: dict[Path, Path | None] = {}
    skipped: Skipped = {}
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
                roots[each] = None
        if paths:
            searched = {parent for file in paths for parent in file.parents}
            for directory in names:
                if directory.is_dir() and directory not in searched:
                    skipped[directory] = f"a directory, and {pattern} also matches files"
            continue
        for root in names:
            below, skipped_below = files_below(root)
            skipped |= skipped_below
            for file in below:
                outer = roots.setdefault(file, root)
                if outer not in (None, root) and root.is_relative_to(outer):
                    roots[file] = root
    # One entry of data.paths may list a file or directory that another entry skips.
    listed = roots.keys() | roots.values()
    return roots, {path: problem for path, problem in skipped.items() if path not in listed}


def files_below(root: Path) -> tuple[list[Path], Skipped]:
    """Return the regular files below a directory, and the skipped entries with reasons.

    Hidden files, hidden subdirectories, and entries that are neither files nor directories are
    skipped. The files are sorted by relative path. Links are followed, but no directory is searched
    twice.
    """
    files: list[Path] = []
    skipped: Skipped = {}
    seen = {os.path.realpath(root)}
    for directory, subdirectories, names in os.walk(root, onerror=unreadable, followlinks=True):
        for name in (*subdirectories, *names):
            if name.startswith("."):
                skipped[Path(directory, name)] = HIDDEN
        targets = {
            os.path.realpath(os.path.join(directory, name)): name
            for name in sorted(subdirectories, reverse=True)
            if not name.startswith(".")
        }
        subdirectories[:] = sorted(targets[target] for target in targets.keys() - seen)
        seen |= targets.keys()
        for name in names:
            path = Path(directory, name)
            if path in skipped:
                continue
            if path.is_file():
                files.append(path)
            else:
                skipped[path] = "not a regular file"
    return sorted(files, key=lambda path: path.relative_to(root).as_posix()), skipped


def unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


def begins_with_mark(path: Path) -> bool:
    """Return whether a file begins with a byte order mark; False if the file is unreadable."""
    from diffllm.data.text.readers import unpacked

    with suppress(OSError, ValueError), unpacked(path) as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    return False
