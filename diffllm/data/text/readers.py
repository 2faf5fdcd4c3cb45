"""Read the documents of local files in slices.

A slice is a range of row groups of a parquet file, a range of lines, or a whole file. Only two
kinds of file are loaded into memory as a whole: JSON arrays, and text files with one document.
"""

import codecs
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from diffllm.core.errors import DataError
from diffllm.data.config import DataConfig, SampleBy
from diffllm.data.text.corpus import (
    ROWS,
    TextBatch,
    check_columns,
    columns_of,
    kinds_of_rows,
    reason,
)
from diffllm.data.text.file_index import COMPRESSIONS, FileFacts

COMPRESSED_TEXT = 4
"""Estimated bytes of text per compressed byte."""
BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Slice:
    path: Path
    facts: FileFacts
    columns: tuple[str, ...]
    size: int
    """Estimated bytes of text."""
    read: Callable[["Slice"], Iterator[TextBatch]]
    start: int = 0
    stop: int | None = None
    """Range in bytes or row groups; None: to the end of the file."""


def slices_of(
    path: Path, facts: FileFacts, form: str, cfg: DataConfig, least: int
) -> Iterator[Slice]:
    """Divide a file into slices that can be read independently.

    Each slice except the last contains at least `least` bytes. A file that cannot be divided, such
    as a compressed text file, is one slice. `form` is "parquet", "json" or "text".
    """
    columns = tuple(columns_of(cfg))
    start = path, facts, columns
    if form == "parquet":
        for size, first, last in row_groups(path, columns, least):
            yield Slice(*start, size, _read_rows, first, last)
        return
    is_compressed = path.suffix.lower() in COMPRESSIONS
    size = facts.size * (COMPRESSED_TEXT if is_compressed else 1)
    read = _read_lines if form == "text" else _read_json_lines
    if form == "text" and cfg.sample_by is not SampleBy.line:
        read = _read_text if cfg.sample_by is SampleBy.document else _read_paragraphs
    elif form == "json" and begins_with(path) == b"[":
        read = _read_json_array
    elif not is_compressed:
        for first, last in pairwise(line_starts(path, size, least)):
            yield Slice(*start, last - first, read, first, last)
        return
    yield Slice(*start, size, read)


def row_groups(path: Path, columns: tuple[str, ...], least: int) -> Iterator[tuple[int, int, int]]:
    """Divide the row groups of a parquet file into ranges of at least `least` bytes.

    For each range, yield (size, first, stop): the range consists of the row groups first to
    stop - 1, which have `size` uncompressed bytes in `columns`. The last range may be smaller.
    Raises DataError if a column is missing or is not text.
    """
    with raw(path) as unread, pyarrow.parquet.ParquetFile(unread) as file:
        types = {field.name: field.type for field in file.schema_arrow}
        kinds: dict[str, str] = {}
        for name, kind in types.items():
            # A dictionary column contains text if its values are text.
            is_dictionary = pyarrow.types.is_dictionary(kind)
            kinds[name] = str(kind.value_type if is_dictionary else kind)
        check_columns(kinds, columns, str(path))
        size = first = 0
        for i in range(file.num_row_groups):
            group = file.metadata.row_group(i)
            for k in range(group.num_columns):
                chunk = group.column(k)
                if chunk.path_in_schema in columns:
                    size += chunk.total_uncompressed_size
            if size >= least or i + 1 == file.num_row_groups:
                yield size, first, i + 1
                size = 0
                first = i + 1


def _read_rows(part: Slice) -> Iterator[TextBatch]:
    assert part.stop is not None
    groups = range(part.start, part.stop)
    columns = list(part.columns)
    with raw(part.path) as unread, pyarrow.parquet.ParquetFile(unread) as file:
        for batch in file.iter_batches(ROWS, row_groups=groups, columns=columns):
            yield TextBatch(*(batch.column(name).to_pylist() for name in columns))


def _read_json_lines(part: Slice) -> Iterator[TextBatch]:
    lines = 0
    is_checked = part.start > 0  # the first slice checks the columns of the file
    for block in text_blocks(part):
        rows: list[Any] = []
        texts: list[list[str | None]] = []
        for line in io.BytesIO(block):
            lines += 1
            try:
                if line.strip():
                    rows.append(json.loads(line.decode()))
                    texts.append(texts_in(rows[-1], part.columns))
            except (ValueError, RecursionError) as error:
                # Lines before the slice are counted only now, because no other case needs them.
                before = sum(skipped.count(b"\n") for skipped in blocks(part.path, 0, part.start))
                message = getattr(error, "msg", reason(error))
                raise DataError(
                    f"line {before + lines:,} of {part.path} cannot be read: {message}"
                ) from error
        kinds = {} if is_checked else kinds_of_rows(rows)
        if kinds:
            check_columns(kinds, part.columns, str(part.path))
            is_checked = True
        yield TextBatch(*map(list, zip(*texts, strict=True))) if texts else TextBatch([])


def _read_json_array(part: Slice) -> Iterator[TextBatch]:
    with unpacked(part.path) as file:
        rows = json.load(file)
    if not rows or not all(isinstance(row, dict) for row in rows):
        column = part.columns[0]
        raise ValueError(
            f"the file must be an array of objects, with text under data.text_column={column}"
        )
    kinds = kinds_of_rows(rows)
    if kinds:
        check_columns(kinds, part.columns[:1], str(part.path))
    for start in range(0, len(rows), ROWS):
        texts = [texts_in(row, part.columns) for row in rows[start : start + ROWS]]
        yield TextBatch(*map(list, zip(*texts, strict=True)))


def texts_in(row: Any, columns: Sequence[str]) -> list[str | None]:
    """Return the text of each column in the JSON object `row`; None for a missing column.

    If `row` is None, all columns are missing. Raises ValueError if `row` is not an object, or if a
    column is not text.
    """
    if row is not None and not isinstance(row, dict):
        raise ValueError(f"the JSON value must be an object, not {type(row).__name__}")
    texts = [(row or {}).get(name) for name in columns]
    for name, text in zip(columns, texts, strict=True):
        if not isinstance(text, str | None):
            raise ValueError(f"column {name!r} contains {type(text).__name__}, not text")
        # Raises for half of a surrogate pair, which JSON allows and UTF-8 does not.
        (text or "").encode()
    return texts


def _read_lines(part: Slice) -> Iterator[TextBatch]:
    for block in text_blocks(part):
        yield TextBatch([line.removesuffix("\n") for line in decoded(block)])


def _read_paragraphs(part: Slice) -> Iterator[TextBatch]:
    rest = ""
    for block in text_blocks(part):
        # The last paragraph of a block may continue in the next block.
        *paragraphs, rest = (rest + decoded(block).read()).split("\n\n")
        yield TextBatch([paragraph for paragraph in paragraphs if paragraph])
    yield TextBatch([rest] if rest else [])


def _read_text(part: Slice) -> Iterator[TextBatch]:
    yield TextBatch([decoded(b"".join(text_blocks(part))).read()])


def line_starts(path: Path, size: int, least: int) -> Iterator[int]:
    """Yield byte offsets: 0, line starts at least `least` bytes apart, and the file size `size`."""
    yield 0
    with path.open("rb") as file:
        place = least
        while place < size:
            # One byte before: if `place` is the start of a line, no line is skipped.
            file.seek(place - 1)
            file.readline()
            if file.tell() < size:
                yield file.tell()
            place = file.tell() + least
    yield size


def blocks(path: Path, start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file from `start` to `stop`, in blocks of whole lines.

    `start` and `stop` are offsets of line starts in the decompressed bytes. If `stop` is None, read
    to the end of the file.
    """
    with unpacked(path) as file:
        if start:
            file.seek(start)
        remaining = math.inf if stop is None else stop - start
        # A list of blocks, because repeated joining of a long line would take quadratic time.
        rest: list[bytes] = []
        while block := file.read(int(min(remaining, BLOCK_BYTES))):
            remaining -= len(block)
            end = block.rfind(b"\n") + 1
            if end:
                yield b"".join([*rest, block[:end]])
                rest = []
            rest.append(block[end:])
        if any(rest):
            yield b"".join(rest)


def text_blocks(part: Slice) -> Iterator[bytes]:
    # A byte order mark can only be at the start of the file.
    for number, block in enumerate(blocks(part.path, part.start, part.stop)):
        yield block if part.start or number else block.removeprefix(codecs.BOM_UTF8)


def unpacked(path: Path) -> IO[bytes]:
    """Open a file; decompress .gz and .zst. Reading fails if a compressed file is truncated."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return path.open("rb")
    stream: Any = pyarrow.CompressedInputStream(raw(path), compression)
    return stream


def raw(path: Path) -> Any:
    # As bytes, because pyarrow encodes a str as UTF-8, also for names that are not UTF-8.
    return pyarrow.OSFile(os.fsencode(path))


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one JSON object per line; skip blank and null lines.

    Raises ValueError or RecursionError for another line.
    """
    for number, block in enumerate(blocks(path, 0, None)):
        text = block if number else block.removeprefix(codecs.BOM_UTF8)
        for line in io.BytesIO(text):
            row = json.loads(line.decode()) if line.strip() else None
            if isinstance(row, dict):
                yield row
            elif row is not None:
                raise ValueError(f"the JSON value must be an object, not {type(row).__name__}")


def begins_with(path: Path) -> bytes:
    with unpacked(path) as file:
        while block := file.read(1 << 16):
            if text := block.removeprefix(codecs.BOM_UTF8).strip():
                return text[:1]
    return b""


def decoded(block: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(block), "utf-8")
