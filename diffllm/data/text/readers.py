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
    if form == "parquet":
        for size, first, stop in row_groups(path, columns, least):
            yield Slice(path, facts, columns, size, _read_rows, first, stop)
        return
    read = reader_of(path, form, cfg)
    is_compressed = path.suffix.lower() in COMPRESSIONS
    # A slice begins at a line, which may be inside a paragraph, a document or a JSON array.
    is_read_by_line = read in (_read_lines, _read_json_lines)
    if is_read_by_line and not is_compressed:
        for start, stop in pairwise(line_starts(path, facts.size, least)):
            yield Slice(path, facts, columns, stop - start, read, start, stop)
        return
    size = facts.size * COMPRESSED_TEXT if is_compressed else facts.size
    yield Slice(path, facts, columns, size, read)


def reader_of(path: Path, form: str, cfg: DataConfig) -> Callable[[Slice], Iterator[TextBatch]]:
    """Return the function that reads slices of a file of the format "json" or "text"."""
    if form == "json":
        return _read_json_array if begins_with(path) == b"[" else _read_json_lines
    if cfg.sample_by is SampleBy.line:
        return _read_lines
    return _read_text if cfg.sample_by is SampleBy.document else _read_paragraphs


def row_groups(path: Path, columns: tuple[str, ...], least: int) -> Iterator[tuple[int, int, int]]:
    """Divide the row groups of a parquet file into ranges of at least `least` bytes.

    For each range, yield (size, first, stop): the range consists of the row groups first to
    stop - 1, which have `size` uncompressed bytes in `columns`. The last range may be smaller.
    Raises DataError if a column is missing or is not text.
    """
    with raw(path) as unread, pyarrow.parquet.ParquetFile(unread) as file:
        kinds: dict[str, str] = {}
        for field in file.schema_arrow:
            kind = field.type
            # A dictionary column contains text if its values are text.
            if pyarrow.types.is_dictionary(kind):
                kind = kind.value_type
            kinds[field.name] = str(kind)
        check_columns(kinds, columns, str(path))
        size = 0
        first = 0
        for stop in range(1, file.num_row_groups + 1):
            group = file.metadata.row_group(stop - 1)
            for k in range(group.num_columns):
                chunk = group.column(k)
                if chunk.path_in_schema in columns:
                    size += chunk.total_uncompressed_size
            if size >= least or stop == file.num_row_groups:
                yield size, first, stop
                size = 0
                first = stop


def _read_rows(part: Slice) -> Iterator[TextBatch]:
    assert part.stop is not None
    groups = range(part.start, part.stop)
    columns = list(part.columns)
    with raw(part.path) as unread, pyarrow.parquet.ParquetFile(unread) as file:
        for batch in file.iter_batches(ROWS, row_groups=groups, columns=columns):
            # With a prompt column, the batch has two columns: texts and prompts.
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
                    row = json.loads(line.decode())
                    rows.append(row)
                    texts.append(texts_in(row, part.columns))
            except (ValueError, RecursionError) as error:
                # Lines before the slice are counted only now, because no other case needs them.
                lines_before = 0
                for skipped in blocks(part.path, 0, part.start):
                    lines_before += skipped.count(b"\n")
                message = getattr(error, "msg", reason(error))
                raise DataError(
                    f"line {lines_before + lines:,} of {part.path} cannot be read: {message}"
                ) from error
        # Rows that are all null have no columns, so the next block is checked too.
        if not is_checked:
            kinds = kinds_of_rows(rows)
            if kinds:
                check_columns(kinds, part.columns, str(part.path))
                is_checked = True
        yield batch_of(texts)


def batch_of(texts: Sequence[Sequence[str | None]]) -> TextBatch:
    """Return the documents of rows, which contain a text and, with prompts, also a prompt."""
    columns = [list(column) for column in zip(*texts, strict=True)]
    # Without rows, no column exists.
    return TextBatch(*columns) if columns else TextBatch([])


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
        yield batch_of([texts_in(row, part.columns) for row in rows[start : start + ROWS]])


def texts_in(row: Any, columns: Sequence[str]) -> list[str | None]:
    """Return the text of each column in the JSON object `row`; None for a missing column.

    If `row` is None, all columns are missing. Raises ValueError if `row` is not an object, or if a
    column is not text.
    """
    if row is not None and not isinstance(row, dict):
        raise ValueError(f"the JSON value must be an object, not {type(row).__name__}")
    values = row or {}
    texts: list[str | None] = []
    for name in columns:
        text = values.get(name)
        if not isinstance(text, str | None):
            raise ValueError(f"column {name!r} contains {type(text).__name__}, not text")
        if text is not None:
            # Raises for half of a surrogate pair, which JSON allows and UTF-8 does not.
            text.encode()
        texts.append(text)
    return texts


def _read_lines(part: Slice) -> Iterator[TextBatch]:
    for block in text_blocks(part):
        yield TextBatch([line.removesuffix("\n") for line in decoded(block)])


def _read_paragraphs(part: Slice) -> Iterator[TextBatch]:
    rest = ""
    for block in text_blocks(part):
        # The last paragraph of a block may continue in the next block. The text has no name: it
        # would stay in memory while the caller encodes the paragraphs.
        *paragraphs, rest = (rest + decoded(block).read()).split("\n\n")
        yield TextBatch([paragraph for paragraph in paragraphs if paragraph])
    yield TextBatch([rest] if rest else [])


def _read_text(part: Slice) -> Iterator[TextBatch]:
    # The bytes of the file have no name: they would stay in memory while the caller encodes the
    # text.
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
            line_start = file.tell()
            if line_start < size:
                yield line_start
            place = line_start + least
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
        pieces: list[bytes] = []
        while block := file.read(int(min(remaining, BLOCK_BYTES))):
            remaining -= len(block)
            lines_end = block.rfind(b"\n") + 1
            if lines_end:
                yield b"".join([*pieces, block[:lines_end]])
                pieces = []
            pieces.append(block[lines_end:])
        # The last line of a file may have no line break.
        if any(pieces):
            yield b"".join(pieces)


def text_blocks(part: Slice) -> Iterator[bytes]:
    is_file_start = part.start == 0
    for block in blocks(part.path, part.start, part.stop):
        # A byte order mark can only be at the start of the file.
        yield block.removeprefix(codecs.BOM_UTF8) if is_file_start else block
        is_file_start = False


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
        text = block.removeprefix(codecs.BOM_UTF8) if number == 0 else block
        for line in io.BytesIO(text):
            if not line.strip():
                continue
            row = json.loads(line.decode())
            if isinstance(row, dict):
                yield row
            elif row is not None:
                raise ValueError(f"the JSON value must be an object, not {type(row).__name__}")


def begins_with(path: Path) -> bytes:
    with unpacked(path) as file:
        while block := file.read(1 << 16):
            text = block.removeprefix(codecs.BOM_UTF8).strip()
            if text:
                return text[:1]
    return b""


def decoded(block: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(block), "utf-8")
