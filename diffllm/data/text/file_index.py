"""Content hashes of files, remembered by (path, size, mtime), so that a second run only stats
them."""

import codecs
import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from diffllm.data.progress import track
from diffllm.data.waiting import held
from diffllm.errors import DataError
from diffllm.files import replace_file

INDEX_VERSION = 1
BLOCK_BYTES = 1 << 20
SAVE_SECONDS = 30.0
"""Seconds of hashing that a kill may cost."""


class FileFacts(NamedTuple):
    """The facts about a file that reading it once gave."""

    size: int
    mtime_ns: int
    sha256: str
    is_utf8: bool
    is_blank: bool
    """True if the file holds nothing but whitespace."""


def file_facts(paths: Sequence[Path], cache_dir: Path) -> list[FileFacts]:
    """Return facts about `paths`, in order, and read only those that are new or changed; raises
    DataError for one that cannot be read."""
    index_path = cache_dir / "file_index.json"
    index = _read_index(index_path)
    if _unknown(paths, index):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with held(Path(f"{index_path}.lock"), f"hashes files for {cache_dir}"):
            index = _read_index(index_path)
            unknown = _unknown(paths, index)
            saved = time.monotonic()
            with (
                track("hashing the corpus", len(unknown)) as advance,
                ThreadPoolExecutor(os.cpu_count()) as pool,  # hashing lets other threads run
            ):
                for path, facts in zip(unknown, pool.map(_read_facts, unknown), strict=True):
                    index[str(path)] = facts
                    advance(1)
                    if time.monotonic() - saved > SAVE_SECONDS:
                        _write_index(index_path, index)
                        saved = time.monotonic()
            _write_index(index_path, index)
    return [index[str(path)] for path in paths]


def combined_hash(parts: Sequence[object]) -> str:
    """Compute the SHA-256 of a sequence of JSON values, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def _unknown(paths: Sequence[Path], index: dict[str, FileFacts]) -> list[Path]:
    unknown = []
    for path in paths:
        facts = index.get(str(path))
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        if facts is None or (facts.size, facts.mtime_ns) != (stat.st_size, stat.st_mtime_ns):
            unknown.append(path)
    return unknown


def _read_facts(path: Path) -> FileFacts:
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    is_utf8, is_blank, block = True, True, b"begin"
    try:
        with path.open("rb") as file:
            # Taken before reading: a change while reading then shows as a newer mtime.
            stat = os.fstat(file.fileno())
            while block:
                block = file.read(BLOCK_BYTES)
                digest.update(block)
                is_blank = is_blank and not block.strip()
                try:
                    decoder.decode(block, final=not block)
                except UnicodeDecodeError:
                    is_utf8 = False
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    return FileFacts(stat.st_size, stat.st_mtime_ns, digest.hexdigest(), is_utf8, is_blank)


def _write_index(path: Path, index: dict[str, FileFacts]) -> None:
    replace_file(path, json.dumps({"version": INDEX_VERSION, "files": index}))


def _read_index(path: Path) -> dict[str, FileFacts]:
    """Read the stored index; empty when it is missing, damaged or of another version."""
    try:
        stored = json.loads(path.read_bytes())
        if stored["version"] != INDEX_VERSION:
            return {}
        return {name: FileFacts(*facts) for name, facts in stored["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
