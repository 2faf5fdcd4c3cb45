"""Formats and content hashes of local files.

The hashes are stored in an index file. A file is hashed again only if its size, times or inode
have changed.
"""

import codecs
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from diffllm.core.console import track
from diffllm.core.errors import DataError, printable
from diffllm.core.files import locked, read_json, replace_file
from diffllm.data.verified import identity_of, settled_identity, usable

JSON_LINES = (".jsonl", ".ndjson")
TEXT_FORMAT_BY_SUFFIX = {**dict.fromkeys((*JSON_LINES, ".json"), "json"), ".txt": "text"}
FORMAT_BY_SUFFIX = {".parquet": "parquet", **TEXT_FORMAT_BY_SUFFIX}
TOKEN_FILES = (".bin", ".idx", ".ds", ".index", ".metadata")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
INDEX_VERSION = 2
BLOCK_BYTES = 1 << 20
LARGEST_INDEX = 2**32


class FileFacts(NamedTuple):
    size: int
    identity: str
    """Inode, size and times."""
    sha256: str
    is_utf8: bool
    is_blank: bool


def ending_of(path: Path) -> str:
    """Return the ending of a file name in lower case, without .gz or .zst, such as ".json"."""
    stem, suffix = os.path.splitext(path.name.lower())
    if suffix in COMPRESSIONS:
        _, suffix = os.path.splitext(stem)
    return suffix


def format_of(path: Path) -> str:
    """Return the format implied by a file name: "parquet", "json", "text", or "" if unsupported."""
    ending = ending_of(path)
    if path.suffix.lower() in COMPRESSIONS:
        return TEXT_FORMAT_BY_SUFFIX.get(ending, "")
    return "" if ending in TOKEN_FILES else FORMAT_BY_SUFFIX.get(ending, "text")


def names_of(names: Sequence[str]) -> str:
    shown = [printable(name) for name in names[:3]]
    if len(names) > 3:
        shown.append("...")
    return ", ".join(shown)


def file_facts(paths: Sequence[Path], cache_dir: Path) -> list[FileFacts]:
    """Return the size, the content hash and the flags `is_utf8` and `is_blank` of each file.

    Only new and changed files are read; an index file in `cache_dir` stores the results. Raises
    DataError for an unreadable file.
    """
    index_path = cache_dir / "file_index.json"
    index = _read_index(index_path)
    # Without a lock in the usual case that all files are in the index.
    if all(_is_known(path, index) for path in paths):
        return [index[str(path)] for path in paths]
    cache_dir.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{index_path}.lock"), f"hashes files for {cache_dir}"):
        # Another process may have extended the index while this process waited for the lock.
        index = _read_index(index_path)
        unknown = [path for path in paths if not _is_known(path, index)]
        with (
            track("hashing the corpus", len(unknown)) as advance,
            ThreadPoolExecutor(os.cpu_count()) as pool,  # hashing releases the GIL
        ):
            for path, facts in zip(unknown, pool.map(_read_facts, unknown), strict=True):
                index[str(path)] = facts
                advance(1)
        content = json.dumps({"version": INDEX_VERSION, "files": index})
        replace_file(index_path, content)
    return [index[str(path)] for path in paths]


def combined_hash(parts: Sequence[object]) -> str:
    content = json.dumps(list(parts))
    return hashlib.sha256(content.encode()).hexdigest()


def _is_known(path: Path, index: dict[str, FileFacts]) -> bool:
    facts = index.get(str(path))
    with usable(path):
        return facts is not None and facts.identity == identity_of(path)


def _read_facts(path: Path) -> FileFacts:
    digest = hashlib.sha256()
    # An incremental decoder, because a block may end within a character.
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_utf8 = True
    is_blank = True
    is_at_end = False
    with usable(path):
        # Before reading, to detect concurrent changes.
        identity = settled_identity(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while not is_at_end:
                block = file.read(BLOCK_BYTES)
                is_at_end = not block
                digest.update(block)
                is_blank = is_blank and not block.strip()
                # The empty block at the end, too: `final` detects an incomplete last character.
                try:
                    decoder.decode(block, final=is_at_end)
                except UnicodeDecodeError:
                    is_utf8 = False
    return FileFacts(size, identity, digest.hexdigest(), is_utf8, is_blank)


def check_unchanged(path: Path, facts: FileFacts) -> None:
    if identity_of(path) != facts.identity:
        raise DataError(f"{path} was changed while the command was running; run the command again")


def _read_index(path: Path) -> dict[str, FileFacts]:
    # A damaged index or one of another version costs only time: all files are hashed again.
    try:
        stored = read_json(path, LARGEST_INDEX, follow=True)
        types = list(FileFacts.__annotations__.values())
        if stored["version"] != INDEX_VERSION:
            return {}
        index: dict[str, FileFacts] = {}
        for name, facts in stored["files"].items():
            if [type(value) for value in facts] != types:
                return {}
            index[name] = FileFacts(*facts)
        return index
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
