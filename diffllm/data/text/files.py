"""Use local files as a corpus."""

import codecs
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diffllm.core.errors import DataError, printable
from diffllm.core.registry import source
from diffllm.data.config import DataConfig
from diffllm.data.text.corpus import Corpus, Part, TextBatch, reason
from diffllm.data.text.file_index import (
    COMPRESSIONS,
    TEXT_FORMAT_BY_SUFFIX,
    TOKEN_FILES,
    FileFacts,
    check_unchanged,
    combined_hash,
    ending_of,
    file_facts,
    format_of,
    names_of,
)
from diffllm.data.text.local_files import LocalFiles, paths_of
from diffllm.data.text.skipped import (
    EMPTY,
    HIDDEN,
    Skipped,
    other_kind,
    reasons_text,
)

if TYPE_CHECKING:
    from diffllm.data.text.readers import Slice

FORMAT_NAMES = {"parquet": "parquet", "json": "JSON", "text": "plain text"}
"""Names of formats in messages. If kinds of a directory have equal size, the first kind is read."""
PART_BYTES = 32_000_000
"""Bytes of text per part of a small corpus."""
MOST_PARTS = 4096


@source("files")
def files(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the files, directories and glob patterns in `cfg.paths` as a corpus.

    Of the files that a directory or a pattern finds in one directory, only one kind is read: the
    kind with the most bytes. The other files are skipped, see `Corpus.skipped`. Raises DataError if
    a file that `cfg.paths` lists cannot be used, or if no file contains text.
    """
    local_files = paths_of(cfg)
    roots = local_files.roots
    supported = [path for path in roots if format_of(path)]
    facts = dict(zip(supported, file_facts(supported, cache_dir), strict=True))
    problems = problems_of(roots, facts, cfg)
    usable_facts = {path: facts[path] for path in supported if path not in problems}
    other = other_kinds(usable_facts, local_files, cfg)
    read_facts = {path: file for path, file in usable_facts.items() if path not in other}
    check_columns_exist(cfg, list(read_facts), list(problems.values()))
    skipped = {**other, **problems, **local_files.skipped}
    # Only the first reasons are printed; empty and hidden files are the least surprising ones.
    skipped = dict(sorted(skipped.items(), key=lambda item: item[1] in (EMPTY, HIDDEN)))
    check_has_text(list(read_facts), roots, skipped, cfg)
    contents = {path: content_of(path, file) for path, file in usable_facts.items()}
    # Older versions read all kinds, and skipped most .json files of directories.
    all_contents = list(contents.values())
    contents_without_json = []
    for path, content in contents.items():
        if roots[path] is None or path.suffix != ".json":
            contents_without_json.append(content)
    former_identities = (hash_of(all_contents, cfg), hash_of(contents_without_json, cfg))
    empty = sum(problem == EMPTY for problem in skipped.values())
    return Corpus(
        description=description_of({path: roots[path] for path in read_facts}),
        identity=hash_of([contents[path] for path in read_facts], cfg),
        former_identities=former_identities,
        list_parts=lambda: parts_of(read_facts, cfg),
        check=partial(check_all, read_facts),
        skipped_empty=empty,
        skipped_undecodable=len(skipped) - empty,
        skipped=skipped,
    )


def check_has_text(
    paths: Sequence[Path], roots: Mapping[Path, Path | None], skipped: Skipped, cfg: DataConfig
) -> None:
    """Raise DataError if `paths`, the files to read, contain no text of a corpus."""
    has_tokens = any(path.suffix in TOKEN_FILES for path in roots)
    # Directories of token files may also contain .json files, which are not the text to train on.
    if not paths or (has_tokens and all(path.suffix == ".json" for path in paths)):
        hint = "; data=tokens reads its token files" if has_tokens else ""
        reasons = f"; skipped {reasons_text(skipped)}" if skipped else ""
        entries = ", ".join(map(str, cfg.paths[:3]))
        raise DataError(
            f"data.paths={entries} has no text file, .parquet file or .jsonl file{hint}{reasons}"
        )


def content_of(path: Path, facts: FileFacts) -> list[str]:
    """Return the hash and the format of a file."""
    form = format_of(path)
    # Older versions kept the byte order mark, so they use a different hash.
    if form == "text" and begins_with_mark(path):
        form += " behind a mark"
    return [facts.sha256, form]


def hash_of(contents: Sequence[list[str]], cfg: DataConfig) -> str:
    """Return the hash of a corpus from the results of `content_of` for its files."""
    return combined_hash(["files", cfg.text_column, cfg.sample_by.value, contents])


def description_of(roots: Mapping[Path, Path | None]) -> str:
    """Describe the files of a corpus, such as "2 parquet files in corpus/" or "1 file: a.txt"."""
    # A dict, because it removes repeated names but keeps their order.
    unique_names: dict[str, None] = {}
    for path, root in roots.items():
        name = f"{root.name}/" if root else path.name
        unique_names[name] = None
    names = names_of(list(unique_names))
    files_word = "file" if len(roots) == 1 else "files"
    if None in roots.values():
        return f"{len(roots)} {files_word}: {names}"
    kinds = {format_of(path) for path in roots}
    if len(kinds) > 1:
        return f"{len(roots)} {files_word} in {names}"
    return f"{len(roots)} {FORMAT_NAMES[kinds.pop()]} {files_word} in {names}"


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
    facts: Mapping[Path, FileFacts], local_files: LocalFiles, cfg: DataConfig
) -> Skipped:
    """Return the usable files that are not of the kind that is read from their directory.

    Of the files that an entry of `cfg.paths` finds in a directory, the kind with the most bytes on
    disk is read. Plain text is not read if `cfg` names a text column and the entry also finds files
    with columns. A listed file is always read; its bytes count for its kind.
    """
    skipped: Skipped = {}
    paths_to_read = {path for path, root in local_files.roots.items() if root is None}
    for directory, files_in_directory in local_files.groups:
        paths = [path for path in files_in_directory if path in facts]
        bytes_of_kind: Counter[str] = Counter()
        for path in paths:
            bytes_of_kind[format_of(path)] += facts[path].size
        # In the order of FORMAT_NAMES, because `max` returns the first of several largest kinds.
        candidates = [kind for kind in FORMAT_NAMES if kind in bytes_of_kind]
        if cfg.text_column != DataConfig.text_column and len(candidates) > 1:
            candidates = [kind for kind in candidates if kind != "text"]
        chosen = max(candidates, key=bytes_of_kind.__getitem__, default="")
        total = bytes_of_kind.total()
        for path in paths:
            kind = format_of(path)
            if kind == chosen:
                paths_to_read.add(path)
                continue
            skipped[path] = other_kind(
                FORMAT_NAMES[kind], directory, FORMAT_NAMES[chosen], bytes_of_kind[chosen], total
            )
    # Another entry of data.paths may list a file or find it in another directory.
    return {path: problem for path, problem in skipped.items() if path not in paths_to_read}


def problem_of(path: Path, facts: FileFacts | None, cfg: DataConfig) -> str:
    """Return the reason why a file cannot be used as text, or "" if the file can be used.

    `facts` is None if the file format is unsupported.
    """
    form = format_of(path)
    if not facts:
        formats = ", ".join(TEXT_FORMAT_BY_SUFFIX)
        text_formats = f".parquet, {formats} (also compressed) and other text"
        return f"unsupported format; data=files reads {text_formats}, data=tokens .bin and .ds"
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
            # Check again after reading: a file that changes meanwhile is no longer the hashed file.
            check_unchanged(part.path, part.facts)
            yield from part.read(part)
            check_unchanged(part.path, part.facts)


def parts_of(facts: Mapping[Path, FileFacts], cfg: DataConfig) -> list[Part]:
    """Divide files into parts of a corpus, which separate processes can read.

    The minimum size of a part is the larger of 32 MB and 1/4096 of the total size. Only the last
    part may be smaller. Raises DataError for an unreadable file.
    """
    from diffllm.data.text.readers import slices_of

    total = sum(file.size for file in facts.values())
    least = max(PART_BYTES, total // MOST_PARTS)
    groups: list[list[Slice]] = []
    size = least
    for path, file in facts.items():
        with naming(path):
            slices = list(slices_of(path, file, format_of(path), cfg, least))
        for part in slices:
            if size >= least:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part.size
    parts = []
    for group in groups:
        name = printable(str(group[0].path))
        if len(group) > 1:
            name += " and others"
        size = sum(part.size for part in group)
        parts.append(Part(name, size, partial(read_slices, group)))
    return parts


def check_all(facts: Mapping[Path, FileFacts]) -> None:
    for path, file in facts.items():
        with naming(path):
            check_unchanged(path, file)


@contextmanager
def naming(source: Path | str) -> Iterator[None]:
    """Convert any error except DataError in a `with` block to a DataError that names `source`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        compression = COMPRESSIONS.get(os.path.splitext(source)[1].lower())
        # An OSError without errno is an error of pyarrow's decompression, not of the disk.
        is_broken = compression and isinstance(error, OSError) and not error.errno
        action = f"decompressed as {compression}" if is_broken else "read"
        raise DataError(f"{source} cannot be {action}: {reason(error)}") from error


def begins_with_mark(path: Path) -> bool:
    """Return whether a file begins with a byte order mark; False if the file is unreadable."""
    from diffllm.data.text.readers import unpacked

    with suppress(OSError, ValueError), unpacked(path) as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    return False
