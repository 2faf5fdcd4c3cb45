"""Foreign texts with random damage are read unchanged, or refused."""

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hostile.damage import damaged, edited, try_all
from hostile.files import HostileFile
from tiers import slow_but

from diffllm.core.errors import DataError, UserError
from diffllm.data import verified
from diffllm.data.config import DataConfig, SampleBy
from diffllm.data.text.corpus import open_corpus

TEXTS = [f'{i} \u00e9\u2581 "quoted" \\ {"abc " * i}\u2028end' for i in range(12)]
LINES = b"".join(
    json.dumps({"id": i, "text": text}).encode() + b"\n" for i, text in enumerate(TEXTS)
)


def parquet(column: pyarrow.Array, name: str = "text") -> bytes:
    out = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({name: column}), out, row_group_size=5)
    return out.getvalue().to_pybytes()


def zst(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def as_json(content: bytes) -> list[str | None]:
    """Return the texts that Python reads from consecutive JSON values, or from an array."""
    text, rows, place = content.decode("utf-8-sig").strip(), [], 0
    while place < len(text):
        row, place = json.JSONDecoder().raw_decode(text, place)
        rows += row if isinstance(row, list) and not rows else [row]
        place += len(text[place:]) - len(text[place:].lstrip())
    return [row and row.get("text") for row in rows]


def as_text(content: bytes) -> list[str | None]:
    return re.split("\r\n|\r|\n", content.decode("utf-8-sig"))


ARRAY = json.dumps([{"text": text} for text in TEXTS]).encode()
WHOLE: dict[str, tuple[bytes, Callable[[bytes], list[str | None]] | None]] = {
    "a.jsonl": (LINES, as_json),
    "a.json": (ARRAY, as_json),
    "a.txt": ("\n".join(TEXTS).encode(), as_text),
    "a.jsonl.gz": (gzip.compress(LINES), None),
    "a.jsonl.zst": (zst(LINES), None),
    "a.json.zst": (zst(ARRAY), None),
    "a.txt.gz": (gzip.compress("\n".join(TEXTS).encode()), None),
    "a.parquet": (parquet(pyarrow.array(TEXTS)), None),
}
"""Content and reference reader of each file; None for formats with a checksum."""


def texts(file: Path, cache: Path) -> list[str | None]:
    by = SampleBy.line if ".txt" in file.name else SampleBy.document
    cfg = DataConfig(source="files", paths=[str(file)], sample_by=by)
    parts = open_corpus(cfg, cache).parts
    return [text for part in parts for some in part.read() for text in some.texts]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    (place / "files").mkdir()
    return place


@pytest.fixture(autouse=True, scope="module")
def no_wait() -> Any:
    """Do not wait for a clock tick before files are rewritten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verified, "TICK", 0)
        yield


def documents(found: list[str | None]) -> list[str]:
    return [text for text in found if text and text.strip()]


@pytest.mark.fast_cases(2)
@pytest.mark.fuzz
@pytest.mark.parametrize("name", WHOLE)
def test_damaged_corpus_file_returns_original_documents_or_raises_error(place, name):
    (whole, reference), file = WHOLE[name], place / "files" / name

    entry = HostileFile("", name, lambda files: texts(files / name, place / "cache"))

    def check(content: bytes) -> None:
        file.write_bytes(content)
        found = entry.outcome(file.parent, [file])
        if name == "a.parquet" and not isinstance(found, UserError):
            assert all(text is None or text.encode() is not None for text in found)
        elif not isinstance(found, UserError):
            assert documents(found) == documents(reference(content) if reference else TEXTS)

    kinds = edited(json.loads(whole)) if name == "a.json" else damaged(whole)
    try_all(check, damaged(whole) | kinds, 60)


DEEP = 100_000
FORMS = ("txt.gz", "txt.zst", "jsonl.gz", "jsonl.zst")
SAME_TEXTS = {
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "no end.jsonl": LINES[:-1],
    "other suffix.ndjson.gz": gzip.compress(LINES),
    "blank lines.jsonl": LINES.replace(b"\n", b"\n \t\n\n"),
    "spaces.jsonl": LINES.replace(b"{", b" \t{").replace(b"}", b"} "),
    "mark.jsonl": b"\xef\xbb\xbf" + LINES,
    "null.jsonl": b"null\n{}\n" + LINES + b"null\n",
    "crlf.txt": "\r\n".join(TEXTS).encode(),
    "two streams.jsonl.gz": gzip.compress(LINES[:40]) + gzip.compress(LINES[40:]),
    "large.parquet": parquet(pyarrow.array(TEXTS, pyarrow.large_string())),
    "dictionary.parquet": parquet(pyarrow.array(TEXTS).dictionary_encode()),
    "a[1] *'%41,.jsonl": LINES,
    os.fsdecode(b"\xff\xfe.jsonl"): LINES,
}
"""Variants that other programs write, with equal texts."""


@pytest.mark.parametrize("name", SAME_TEXTS, ids=ascii)
def test_unusual_but_valid_corpus_files_are_read_correctly(place, name):
    file = place / "files" / name
    link = place / "files" / f"link{''.join(file.suffixes[-2:])}"
    file.write_bytes(SAME_TEXTS[name])
    link.symlink_to(file)
    for path in (file, link):
        assert documents(texts(path, place / "cache")) == TEXTS
    link.unlink()


BAD_LINES = [
    b'{"text": 3}', b'{"text": 1.5}', b'{"text": true}', b'{"text": ["a"]}',
    b'{"text": {"a": "b"}}', b"3", b'"text"', b"[1]", b"true", b"{", b'{"text": "a"',
    b'{"text": "a}', b"{'text': 'a'}", b'{"text": "a"} x', b'{"text": "\\ud800"}',
    b'{"text": "a\\udc00b"}', b'{"text": "\xff"}',
    b'{"text": "a\0b"}', b'{"text": "a\tb"}', b'{"text": "\\x"}', b"\0", b'{"text": "a",}',
    b'{"text"}', b'{"text": NaN}', b"[" * DEEP,
    b'{"text": ' + b"[" * DEEP + b"]" * DEEP + b"}",
]  # fmt: skip


@pytest.mark.parametrize("pack", [bytes, zst], ids=["plain", "packed"])
def test_invalid_json_line_raises_error_with_line_number(place, pack):
    file = place / "files" / ("bad.jsonl" if pack is bytes else "bad.jsonl.zst")
    rows = LINES.splitlines()
    for place_of_it, line in enumerate(BAD_LINES):
        number = 1 + place_of_it % 8
        file.write_bytes(pack(b"\n".join([*rows[:number], line, *rows[number:]])))
        said = f"line {number + 1} of {file} cannot be read: |{file} cannot be .*: not UTF-8"
        with pytest.raises(DataError, match=said) as caught:
            texts(file, place / "cache")
        assert str(caught.value).isprintable()


COLUMNS = [
    [["a"]], [{"a": "b"}], [1], [1.5], [True], [b"a"], pyarrow.nulls(1),
    pyarrow.array([1]).dictionary_encode(),
    pyarrow.array([b"a \xff b"]).view(pyarrow.string()),
]  # fmt: skip


@pytest.mark.parametrize("column", COLUMNS, ids=str)
def test_parquet_column_without_text_is_refused(place, column):
    file = place / "files" / "column.parquet"
    file.write_bytes(parquet(pyarrow.array(column) if isinstance(column, list) else column))
    with pytest.raises(DataError, match=str(file)):
        texts(file, place / "cache")


@pytest.mark.parametrize(
    ("form", "flushed"),
    slow_but([("txt.gz", False), ("jsonl.zst", True)], product(FORMS, [False, True])),
)
def test_truncated_compressed_corpus_file_is_refused(place, form, flushed):
    """Truncation is detected even if the decompressed bytes end with a line, as after a flush."""
    lines = [f"{i} {'abc ' * 10}".encode() for i in range(6)]
    lines = [b'{"text": "%b"}\n' % x if form.startswith("jsonl") else x + b"\n" for x in lines]
    content, ends = b"", set()
    for line in [b"".join(lines), *lines[:2]]:
        if form.endswith("gz"):
            stream: Any = zlib.compressobj(wbits=31)
            flush = [zlib.Z_SYNC_FLUSH]
        else:
            stream = zstandard.ZstdCompressor().compressobj()
            flush = [zstandard.COMPRESSOBJ_FLUSH_BLOCK]
        for part in line.splitlines(keepends=True):
            content += stream.compress(part) + (stream.flush(*flush) if flushed else b"")
        content += stream.flush()
        ends.add(len(content))
    file = place / "files" / f"cut.{form}"
    for end in range(1, len(content)):
        file.write_bytes(content[:end])
        if end not in ends:  # a missing last stream cannot be detected
            with pytest.raises(DataError, match=f"{file} cannot be decompressed as "):
                texts(file, place / "cache")
