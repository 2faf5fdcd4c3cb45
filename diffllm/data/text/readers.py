"""Documents of local files, read some at a time: nothing is copied.

A file is read in slices. Parquet is cut between row groups, JSON lines and lines of text between
lines; what is compressed, an array of JSON or paragraphs of text are one slice each. Only an array
of JSON and a text that is one document are in memory whole.
"""

import codecs
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.json
import pyarrow.parquet
import zstandard

from diffllm.core.errors import DataError
from diffllm.data.config import SampleBy
from diffllm.data.text.corpus import ROWS, TextBatch, check_columns, reason
from diffllm.data.text.file_index import FileFacts
from diffllm.data.text.formats import COMPRESSIONS

COMPRESSED_TEXT = 4
"""Bytes of text in a byte of a compressed file, about."""
BLOCK_BYTES = 1 << 22
PACKED_BYTES = 1 << 12
"""Bytes of a .zst file that are unpacked at a time; the unpacked text is at most 128 MiB."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
NO_LINES = (pyarrow.ArrowException, UnicodeDecodeError)
"""Errors of lines that are no JSON, or no text where there has to be one."""
LEADING_NULL = re.compile(rb"\s*null")
SEEN_LINES = 1000
"""JSON lines that say which columns there are."""


@dataclass(frozen=True)
class Slice:
    """A stretch of a file."""

    path: Path
    facts: FileFacts
    """Size, time and hash of the file as it was when it was hashed."""
    columns: tuple[str, ...]
    several: bool
    """Whether other files need the same columns."""
    size: int
    """About how many bytes of text it has."""

    def read(self) -> Iterator[TextBatch]:
        raise NotImplementedError


@dataclass(frozen=True)
class RowGroups(Slice):
    """Row groups of a parquet file."""

    groups: tuple[int, ...]

    def read(self) -> Iterator[TextBatch]:
        """Yield the rows."""
        with raw(self.path) as unread, pyarrow.parquet.ParquetFile(unread) as file:
            batches = file.iter_batches(ROWS, row_groups=self.groups, columns=list(self.columns))
            for batch in batches:
                yield TextBatch(*(batch.column(name).to_pylist() for name in self.columns))


@dataclass(frozen=True)
class JsonLines(Slice):
    """Whole lines of a JSON-lines file, each an object."""

    start: int
    stop: int | None
    """Bytes; None for all of a compressed file."""

    def read(self) -> Iterator[TextBatch]:
        """Yield the objects' columns, None where one lacks them."""
        explicit = pyarrow.schema([(name, pyarrow.string()) for name in self.columns])
        known = pyarrow.json.ParseOptions(explicit, unexpected_field_behavior="ignore")
        place, seen = self.start, self.start > 0
        for whole in blocks(self.path, self.start, self.stop):
            block = whole if place else whole.removeprefix(codecs.BOM_UTF8)
            if block.strip():
                if not seen and (kinds := kinds_in(block)):
                    check_columns(kinds, self.columns, str(self.path), self.several)
                seen = True
                try:
                    yield parsed(block, known)
                except NO_LINES as error:
                    bad, error = first_bad_line(block, known, error)
                    line = line_breaks(self.path, place) + bad
                    what = re.sub(r"\.? in row \d+$", "", reason(error))
                    raise DataError(f"{self.path}: line {line:,}: {what}") from error
            place += len(whole)


@dataclass(frozen=True)
class JsonArray(Slice):
    """A JSON file that is an array of objects, read at once."""

    def read(self) -> Iterator[TextBatch]:
        """Yield the objects' columns, None where one lacks them."""
        with opened(self.path) as file:
            rows = json.load(file)
        types = sorted({"objects" if isinstance(r, dict) else type(r).__name__ for r in rows})
        if types != ["objects"]:
            needed = f"arrays of objects, with the text under data.text_column={self.columns[0]}"
            what = f"an array of {', '.join(types)}" if types else "an empty array"
            raise ValueError(f"{what}; data=files reads {needed}")
        if kinds := kinds_of_rows(rows[:SEEN_LINES]):
            check_columns(kinds, self.columns[:1], str(self.path), self.several)
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            yield TextBatch(*([text_of(row, name) for row in some] for name in self.columns))


@dataclass(frozen=True)
class TextLines(Slice):
    """Whole lines of a text, each a document."""

    start: int
    stop: int | None

    def read(self) -> Iterator[TextBatch]:
        for block in text_blocks(self.path, self.start, self.stop):
            yield TextBatch([line.removesuffix("\n") for line in decoded(block)])


@dataclass(frozen=True)
class Paragraphs(Slice):
    """A text whose documents are parted by an empty line."""

    def read(self) -> Iterator[TextBatch]:
        """Yield the paragraphs."""
        rest = ""
        for block in text_blocks(self.path, 0, None):
            *whole, rest = (rest + decoded(block).read()).split("\n\n")
            yield TextBatch(list(filter(None, whole)))
        yield TextBatch([rest] if rest else [])


@dataclass(frozen=True)
class WholeText(Slice):
    """A text that is one document."""

    def read(self) -> Iterator[TextBatch]:
        yield TextBatch([decoded(b"".join(text_blocks(self.path, 0, None))).read()])


def slices_of(
    path: Path,
    facts: FileFacts,
    form: str,
    sample_by: SampleBy,
    columns: tuple[str, ...],
    least: int,
    several: bool,
) -> Iterator[Slice]:
    """Cut a file into slices of at least so many bytes, where it can be cut.

    Args:
        form: "parquet", "json" or "text".
        several: whether other files need the same columns.
    """
    if form == "parquet":
        return row_groups(path, facts, columns, least, several)
    compressed = path.suffix.lower() in COMPRESSIONS
    whole = path, facts, columns, several, facts.size * (COMPRESSED_TEXT if compressed else 1)
    if form == "text" and sample_by is SampleBy.document:
        return iter([WholeText(*whole)])
    if form == "text" and sample_by is SampleBy.paragraph:
        return iter([Paragraphs(*whole)])
    if form == "json" and begins_with(path) == b"[":
        return iter([JsonArray(*whole)])
    kind = TextLines if form == "text" else JsonLines
    if compressed:
        return iter([kind(*whole, 0, None)])
    return (
        kind(path, facts, columns, several, stop - start, start, stop)
        for start, stop in pairwise(line_starts(path, facts.size, least))
    )


def row_groups(
    path: Path, facts: FileFacts, columns: tuple[str, ...], least: int, several: bool
) -> Iterator[Slice]:
    """Collect row groups until their columns have so many bytes."""
    with raw(path) as unread, pyarrow.parquet.ParquetFile(unread) as file:
        kinds = {field.name: kind_of(field.type) for field in file.schema_arrow}
        check_columns(kinds, columns, str(path), several)
        groups: list[int] = []
        size = 0
        for i in range(file.num_row_groups):
            group = file.metadata.row_group(i)
            chunks = (group.column(k) for k in range(group.num_columns))
            groups.append(i)
            size += sum(c.total_uncompressed_size for c in chunks if c.path_in_schema in columns)
            if size >= least or i + 1 == file.num_row_groups:
                yield RowGroups(path, facts, columns, several, size, tuple(groups))
                groups, size = [], 0


def kind_of(column: pyarrow.DataType) -> str:
    """Name the type of a column's values, which a dictionary may hold."""
    return str(column.value_type if pyarrow.types.is_dictionary(column) else column)


def line_starts(path: Path, size: int, least: int) -> Iterator[int]:
    """Yield places where a line begins, at least so many bytes apart, from 0 to the end."""
    yield 0
    with path.open("rb") as file:
        place = least
        while place < size:
            file.seek(place - 1)
            file.readline()
            if file.tell() < size:
                yield file.tell()
            place = file.tell() + least
    yield size


def blocks(path: Path, start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the bytes [start, stop) of a file, which end with a line, as blocks of whole lines."""
    with opened(path) as file:
        if start:
            file.seek(start)
        left = None if stop is None else stop - start
        rest: list[bytes] = []
        while block := file.read(BLOCK_BYTES if left is None else min(left, BLOCK_BYTES)):
            left = None if left is None else left - len(block)
            end = block.rfind(b"\n") + 1
            if end:
                yield b"".join([*rest, block[:end]])
                rest = []
            rest.append(block[end:])
        if any(rest):
            yield b"".join(rest)


def text_blocks(path: Path, start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the same of a text, without the byte order mark at its beginning."""
    for number, block in enumerate(blocks(path, start, stop)):
        yield block if start or number else block.removeprefix(codecs.BOM_UTF8)


def opened(path: Path) -> IO[bytes]:
    """Open a file, unpacked if it is compressed; what breaks off raises."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return path.open("rb")
    if compression == "zstd":
        return io.BufferedReader(ZstdFile(path))
    stream: Any = pyarrow.CompressedInputStream(raw(path), compression)
    return stream


class ZstdFile(io.RawIOBase):
    """The unpacked content of a .zst file, all of its frames.

    pyarrow refuses windows above 128 MiB, and zstandard's own file object ignores a cut-off frame.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("rb")
        self.packed, self.text = b"", memoryview(b"")
        self.frame: zstandard.ZstdDecompressionObj | None = None
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, and return its filled bytes; raises OSError for a damaged file."""
        while not self.text and (packed := self.packed or self.file.read(PACKED_BYTES)):
            frame = self.frame or self.decompressor.decompressobj()
            try:
                self.text = memoryview(frame.decompress(packed))
            except zstandard.ZstdError as error:
                if "memory" in str(error):  # the window is too large, or memory ran out
                    raise DataError(f"{self.path}: {error}; the maximum window is 2 GiB") from error
                raise OSError(str(error)) from error
            self.packed, self.frame = frame.unused_data, None if frame.eof else frame
        if not self.text and self.frame:
            raise OSError("its last frame is cut off")
        count = min(len(buffer), len(self.text))
        buffer[:count], self.text = self.text[:count], self.text[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


def raw(path: Path) -> Any:
    """Open a file for pyarrow, whose names of files are UTF-8 unless they are bytes."""
    return pyarrow.OSFile(os.fsencode(path))


def begins_with(path: Path) -> bytes:
    """Return the first byte of a file that is not whitespace."""
    with opened(path) as file:
        while block := file.read(1 << 16):
            if text := block.removeprefix(codecs.BOM_UTF8).strip():
                return text[:1]
    return b""


def decoded(block: bytes) -> io.TextIOWrapper:
    """Return UTF-8 as a text, whose lines end with a line feed, whatever they end with here."""
    return io.TextIOWrapper(io.BytesIO(block), "utf-8")


def parsed(block: bytes, options: pyarrow.json.ParseOptions) -> TextBatch:
    """Parse the columns of JSON lines that the options name; raises NO_LINES."""
    added = 1 if LEADING_NULL.match(block) else 0
    block = b"{}\n" * added + block  # pyarrow crashes at a null that follows no object
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    table = pyarrow.json.read_json(pyarrow.BufferReader(block), reading, options)
    names = options.explicit_schema.names
    return TextBatch(*(table.column(name).to_pylist()[added:] for name in names))


def first_bad_line(
    block: bytes, options: pyarrow.json.ParseOptions, error: Exception
) -> tuple[int, Exception]:
    """Return the number, from 1, of the first line that cannot be parsed with those before it, and
    why.

    Args:
        error: what parsing all of them says.
    """
    lines = io.BytesIO(block).readlines()
    good, bad = 0, len(lines)
    while bad - good > 1:
        middle = (good + bad) // 2
        some = b"".join(lines[:middle])
        try:
            if some.strip():
                parsed(some, options)
            good = middle
        except NO_LINES as earlier:
            bad, error = middle, earlier
    return bad, error


def line_breaks(path: Path, place: int) -> int:
    """Count the line feeds in the first bytes of a text, up to a place where a line begins."""
    counted = 0
    with opened(path) as file:
        while block := file.read(min(place, BLOCK_BYTES)):
            counted += block.count(b"\n")
            place -= len(block)
    return counted


def kinds_in(block: bytes) -> dict[str, str]:
    """Return the types of the columns of the first JSON lines by name, as far as they can be told:
    others may have any types, and what is no JSON is found where it is parsed."""
    rows = []
    for line in block.split(b"\n", SEEN_LINES)[:SEEN_LINES]:
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return kinds_of_rows(rows)


def kinds_of_rows(rows: Sequence[Any]) -> dict[str, str]:
    """Return the types of the columns of JSON objects by name; text where it may be that."""
    kinds: dict[str, str] = {}
    for row in rows:
        for name, value in row.items() if isinstance(row, dict) else ():
            known = isinstance(value, str) or value is None
            kinds.setdefault(name, "string" if known else type(value).__name__)
    return kinds


def text_of(row: dict[str, Any], name: str) -> str | None:
    """Return the text that a JSON object has under a name, None where it has none; raises
    ValueError for anything else."""
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{json.dumps(row)[:80]} has no text under {name!r}")
    if value and LONE_SURROGATE.search(value):
        raise ValueError(f"{json.dumps(row)[:80]} has half a character, which no text has")
    return value
