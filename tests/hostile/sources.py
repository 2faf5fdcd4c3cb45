"""Corpora drawn by chance, good ones in odd clothes and damaged ones, and what must come of each.

`draw` writes one into a directory. A command that is given its words has to use exactly the texts
that are expected, in this order but for those held out, or to end with one line that names what is
in `named` and change nothing.
"""

import gzip
import io
import json
import os
import random
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SWAPPED = "ghjklmopqsvwyz"
"""Letters of texts that are in no key and no escape of JSON."""
ODD = [
    "\u00e9",
    "\u2581",
    "\u2028",
    "\u0085",
    "\x0b",
    "\x0c",
    "\x1c",
    "\u200b",
    "\ufb01",
    "\U0001f600",
    "e\u0301",
    "\\",
    '"',
]
"""Pieces of text that some reader somewhere takes for another."""
TABLES = ("jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "json.zst", "parquet")
PACKED = ("jsonl.gz", "jsonl.zst", "txt.gz", "txt.zst", "json.gz", "json.zst")
LINES = ("jsonl", "jsonl.gz", "jsonl.zst")


@dataclass(frozen=True)
class Drawn:
    """A corpus on disk."""

    kind: str
    """Its oddity and its format, in words."""
    paths: list[Path]
    """Its files."""
    words: list[str]
    """Overrides of a command that uses it."""
    expected: list[str] | None
    """The texts of its documents that are more than blank; None where it has to be refused."""
    named: list[str] = field(default_factory=list)
    """Parts of the line that refuses it."""


Oddity = Callable[[random.Random, Path, str, list[str]], Drawn]
ODDITIES: dict[str, tuple[Oddity, tuple[str, ...]]] = {}
"""By name: what writes such a corpus into a directory, in a format, of texts; and the formats."""


def draw(rng: random.Random, directory: Path, kind: str | None = None) -> Drawn:
    """Write a corpus into an empty directory.

    Args:
        kind: one of `kinds()`; any of them unless given.
    """
    name, _, form = (kind or rng.choice(kinds())).partition(" ")
    oddity, _ = ODDITIES[name]
    return replace(oddity(rng, directory, form, texts(rng)), kind=f"{name} {form}")


def kinds() -> list[str]:
    """List all that can be drawn: "oddity format"."""
    return [f"{name} {form}" for name, (_, forms) in ODDITIES.items() for form in forms]


def rewritten(rng: random.Random, drawn: Drawn) -> Drawn:
    """Put other texts into good files that are not packed, of their sizes and with their times."""
    pair = "".join(rng.sample(SWAPPED, 2))
    swap = str.maketrans(pair, pair[::-1])
    for path in drawn.paths:
        content, before = path.read_bytes(), path.stat()
        if rng.random() < 0.5:
            path.unlink()
        path.write_bytes(content.translate(bytes.maketrans(pair.encode(), pair[::-1].encode())))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return replace(drawn, expected=[text.translate(swap) for text in drawn.expected or []])


def texts(rng: random.Random) -> list[str]:
    """Texts that differ, odd characters among them, without line ends."""
    return [f"{i} {sentence(rng)}" for i in range(rng.randint(12, 40))]


def sentence(rng: random.Random) -> str:
    """Some words, with something odd between them at times."""
    words = ["".join(rng.choices(LETTERS, k=rng.randint(2, 8))) for _ in range(rng.randint(3, 20))]
    for _ in range(rng.randrange(3)):
        words.insert(rng.randrange(len(words)), rng.choice(ODD))
    return " ".join(words)


def oddity(*forms: str) -> Callable[[Oddity], Oddity]:
    """Enter what writes a corpus, for these formats."""

    def enter(function: Oddity) -> Oddity:
        ODDITIES[function.__name__] = function, forms
        return function

    return enter


def words_of(form: str, paths: Sequence[Path | str]) -> list[str]:
    """Overrides that read files of a format."""
    quoted = ",".join(f'"{path}"' for path in paths)
    by_line = ["data.sample_by=line"] * form.startswith("txt")
    return ["data=files", f"data.paths=[{quoted}]", *by_line]


def encoded(form: str, rows: Sequence[Any], more: dict[str, Any] | None = None) -> bytes:
    """Return the unpacked content of a file, whose column of text has these values."""
    if form.startswith("txt"):
        return "".join(f"{row}\n" for row in rows).encode()
    objects = [{"id": i, "text": row, **(more or {})} for i, row in enumerate(rows)]
    if form.startswith("jsonl"):
        return "".join(
            json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(objects)
        ).encode()
    return json.dumps(objects, indent=1).encode()


def packed(form: str, content: bytes, rng: random.Random) -> bytes:
    """Return a file's content, in one of the ways in which such files are packed."""
    if not form.endswith((".gz", ".zst")):
        return content
    ends = [0, *sorted(rng.sample(range(1, len(content)), min(5, len(content) - 1))), len(content)]
    pieces = [content[start:stop] for start, stop in pairwise(ends)]
    how = rng.choice(["one", "flushed", "many"])
    if how == "many":
        return b"".join(stream_of(form, [piece], False) for piece in pieces)
    return stream_of(form, pieces, how == "flushed", rng.random() < 0.5)


def stream_of(form: str, pieces: Sequence[bytes], flushed: bool, checksum: bool = False) -> bytes:
    """Pack pieces as one stream; `flushed` ends a block behind each, so that it can be unpacked
    without what follows."""
    if form.endswith(".gz"):
        gz = zlib.compressobj(wbits=31)
        flush = zlib.Z_FULL_FLUSH if flushed else zlib.Z_NO_FLUSH
        return b"".join(gz.compress(p) + gz.flush(flush) for p in pieces) + gz.flush()
    zst = zstandard.ZstdCompressor(write_checksum=checksum)
    if not flushed:
        return zst.compress(b"".join(pieces))
    out = io.BytesIO()
    with zst.stream_writer(out, closefd=False) as writer:
        for piece in pieces:
            writer.write(piece)
            writer.flush(zstandard.FLUSH_BLOCK)
    return out.getvalue()


def table_bytes(
    column: pyarrow.Array | pyarrow.ChunkedArray, name: str = "text", rows: int = 7
) -> bytes:
    """Return a parquet file with a column, in groups of some rows."""
    out = pyarrow.BufferOutputStream()
    table = pyarrow.table({"id": list(range(len(column))), name: column})
    pyarrow.parquet.write_table(table, out, row_group_size=rows)
    return out.getvalue().to_pybytes()


def write(rng: random.Random, path: Path, form: str, rows: Sequence[str | None]) -> Path:
    """Write a good file."""
    if form == "parquet":
        path.write_bytes(table_bytes(pyarrow.array(rows, pyarrow.string())))
    else:
        path.write_bytes(packed(form, encoded(form, rows), rng))
    return path


def beside_good(
    rng: random.Random, directory: Path, form: str, texts: list[str], odd: Path
) -> list[Path]:
    """Write good files around an odd one; return all in order."""
    a = write(rng, directory / f"a.{form}", form, texts[:4])
    c = write(rng, directory / f"c.{form}", form, texts[4:8])
    return [a, odd, c]


def refused(form: str, paths: list[Path], *named: str) -> Drawn:
    """A corpus that has to be refused."""
    return Drawn("", paths, words_of(form, paths), None, list(named))


def used(form: str, paths: list[Path], expected: list[str]) -> Drawn:
    """A corpus that has to be used."""
    return Drawn("", paths, words_of(form, paths), expected)


# What is good


@oddity(*TABLES, "txt", "txt.gz", "txt.zst")
def good(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """Several files, found by name or by a glob."""
    cut = rng.randint(2, len(texts) - 2)
    paths = [
        write(rng, directory / f"{n}.{form}", form, part)
        for n, part in (("a", texts[:cut]), ("b", texts[cut:]))
    ]
    words = words_of(form, [directory / f"*.{form}"] if rng.random() < 0.5 else paths)
    return Drawn("", paths, words, texts)


@oddity(*TABLES)
def nothing_in_some_rows(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """Rows without a text, and blank ones, are no documents."""
    rows: list[str | None] = list(texts)
    for _ in range(3):
        rows.insert(rng.randrange(len(rows)), rng.choice([None, "", " \n\t"]))
    return used(form, [write(rng, directory / f"a.{form}", form, rows)], texts)


@oddity(*LINES)
def odd_lines(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """JSON lines as other programs write them."""
    lines = encoded(form, texts).split(b"\n")[:-1]
    how = rng.choice(
        ["crlf", "no end", "blank lines", "spaces", "mark", "other types", "deep", "no column"]
    )
    end = b"\r\n" if how == "crlf" else b"\n"
    if how == "blank lines":
        lines = [part for line in lines for part in (line, b"")]
    if how == "spaces":
        lines = [b" \t" + line + b" " for line in lines]
    if how == "other types":
        others: list[Any] = [1, "x", None, [1, "a"], {"text": 3}, 1.5, True, 10**30]
        lines = [json.dumps({"meta": rng.choice(others), "text": text}).encode() for text in texts]
    if how == "deep":
        deep = b'{"a":' * DEEP + b"1" + b"}" * DEEP
        lines.insert(0, b'{"id": %b, "text": "deep"}' % deep)
        texts = ["deep", *texts]
    if how == "no column":
        lines.insert(rng.randrange(1, len(lines)), b'{"id": 3}')
    content = end.join(lines) + (b"" if how == "no end" else end)
    if how == "mark":
        content = b"\xef\xbb\xbf" + content
    path = directory / f"a.{form}"
    path.write_bytes(packed(form, content, rng))
    return replace(used(form, [path], texts), words=words_of(form, [path]))


@oddity("jsonl", "json", "parquet")
def line_ends_in_texts(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """A text is used as it is, whatever ends its lines."""
    ends = ["\n", "\r\n", "\r", "\n\n", "\0", "\t"]
    texts = [text.replace(" ", rng.choice(ends), 2) + rng.choice(["", "\n"]) for text in texts]
    return used(form, [write(rng, directory / f"a.{form}", form, texts)], texts)


@oddity("txt", "txt.gz", "txt.zst")
def line_ends_of_a_text(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """Lines end as they do on any system, the last one perhaps not at all."""
    end = rng.choice(["\n", "\r\n"])
    content = end.join(texts) + rng.choice([end, ""])
    path = directory / f"a.{form}"
    path.write_bytes(packed(form, content.encode(), rng))
    return used(form, [path], texts)


@oddity("jsonl")
def a_huge_line(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """A line that is longer than what is read at a time."""
    texts[rng.randrange(len(texts))] = "long " + sentence(rng) * 50_000
    return used(form, [write(rng, directory / f"a.{form}", form, texts)], texts)


@oddity("parquet")
def column_types(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """The types that a column of text can have."""
    column: Any = pyarrow.array(texts, rng.choice([pyarrow.string(), pyarrow.large_string()]))
    if rng.random() < 0.5:
        column = column.dictionary_encode()
    path = directory / "a.parquet"
    path.write_bytes(table_bytes(column, rows=rng.choice([1, 3, 1000])))
    return used(form, [path], texts)


@oddity("parquet")
def empty_tables(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """A file without rows, or without groups of rows, among good ones."""
    empty = directory / "b.parquet"
    schema = pyarrow.schema([("id", pyarrow.int64()), ("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(empty, schema) as writer:
        if rng.random() < 0.5:
            writer.write_table(schema.empty_table())
    return used(form, beside_good(rng, directory, form, texts, empty), texts[:8])


@oddity("jsonl", "txt", "parquet", "jsonl.gz", "json.zst")
def names(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """Names with what globs, shells and Unicode trip over."""
    odd = rng.choice(
        [b"\xff\xfe", b"a[1]", b"*", b"a b", b"-x", "\u00e9".encode(), b"a'b", b"#", b"%41", b"a,b"]
    )
    path = Path(os.fsdecode(os.fsencode(directory) + b"/" + odd + f".{form}".encode()))
    write(rng, path, form, texts)
    return Drawn("", [path], words_of(form, [directory / f"*.{form}"]), texts)


@oddity("jsonl", "txt", "parquet")
def linked(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """A link to a file is that file."""
    write(rng, directory / "there", form, texts)
    path = directory / f"a.{form}"
    path.symlink_to("there")
    return used(form, [path], texts)


# What is damaged


@oddity(*PACKED)
def cut_off(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """A packed file that ends too early, perhaps behind a whole line of its text.

    It is packed as one stream: where a whole one is missing behind another, nothing shows it.
    """
    lines = encoded(form, texts[8:]).splitlines(keepends=True)
    whole = stream_of(form, lines, flushed=rng.random() < 0.5, checksum=rng.random() < 0.5)
    place = rng.randrange(1, len(whole))
    if rng.random() < 0.3:
        place = len(stream_of(form, lines[: rng.randrange(1, len(lines))], flushed=True))
        whole = stream_of(form, lines, flushed=True)
    path = directory / f"b.{form}"
    path.write_bytes(whole[:place])
    return refused(form, beside_good(rng, directory, form, texts, path), str(path))


@oddity("jsonl", "json", "parquet")
def cut_off_plain(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """A file that ends inside of a record."""
    whole = write(rng, directory / f"b.{form}", form, texts[8:])
    content = whole.read_bytes()
    place = rng.randrange(1, len(content))
    while form == "jsonl" and (content[place - 1 : place] in b"\n}" or content[place] in b"\n"):
        place = rng.randrange(1, len(content))
    whole.write_bytes(content[:place])
    return refused(form, beside_good(rng, directory, form, texts, whole), str(whole))


@oddity("jsonl.gz", "txt.gz", "json.gz", "jsonl.zst", "txt.zst", "json.zst")
def flipped(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """A bit of a packed file with a checksum; behind its header, which says little."""
    content = encoded(form, texts[8:])
    if form.endswith(".gz"):
        whole = bytearray(gzip.compress(content))
    else:
        whole = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(content))
    # The byte before the trailer of gzip may hold unused bits, which change nothing.
    places = [place for place in range(20, len(whole)) if place != len(whole) - 9]
    whole[rng.choice(places)] ^= 1 << rng.randrange(8)
    path = directory / f"b.{form}"
    path.write_bytes(whole)
    return refused(form, beside_good(rng, directory, form, texts, path), str(path))


@oddity(*PACKED)
def garbage_behind(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """Something else behind a packed file."""
    path = write(rng, directory / f"b.{form}", form, texts[8:])
    with path.open("ab") as file:
        file.write(rng.choice([b"garbage", b"\n", bytes(16), b"{}\n"]))
    return refused(form, beside_good(rng, directory, form, texts, path), str(path))


@oddity(*LINES)
def a_bad_line(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """A line that holds no text where one is asked for; it is named by its number in the file."""
    lines = encoded(form, texts).split(b"\n")[:-1]
    bad = rng.choice(BAD_LINES)
    place = rng.randrange(len(lines))
    lines.insert(place, bad)
    line = f"line {place + 1}" if place else ""  # of a first line the column's type is said
    path = directory / f"a.{form}"
    path.write_bytes(packed(form, b"\n".join(lines) + b"\n", rng))
    return refused(form, [path], str(path), line)


DEEP = 100_000
BAD_LINES = [
    b'{"text": 3}', b'{"text": 1.5}', b'{"text": true}', b'{"text": ["a"]}',
    b'{"text": {"a": "b"}}',
    b"3", b'"text"', b"[1]", b"true", b"{", b'{"text": "a"', b'{"text": "a}', b"{'text': 'a'}",
    b'{"text": "a"} x', b'{"text": "\\ud800"}', b'{"text": "a\\udc00b"}', b'{"text": "\xff"}',
    b'{"text": "a\0b"}', b'{"text": "a\tb"}', b'{"text": "\\x"}', b"\0",
    b'{"text": "a",}', b'{"text"}',
    b'{"text": "a", "text": "b"}', b'{"text": NaN}',
    b'{"text": ' + b"[" * DEEP + b"]" * DEEP + b"}", b"[" * DEEP,
]  # fmt: skip


@oddity("json", "json.gz", "json.zst")
def a_bad_array(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """An array with something else than objects that have a text."""
    rows = [json.dumps({"text": text}).encode() for text in texts]
    rows.insert(
        rng.randrange(len(rows)),
        rng.choice([line for line in BAD_LINES if line.count(b"text") < 2]),
    )
    path = directory / f"a.{form}"
    path.write_bytes(packed(form, b"[" + b",\n".join(rows) + b"]", rng))
    return refused(form, [path], str(path))


@oddity("parquet")
def wrong_column(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """A column that is no text, or none of that name, in a file among good ones."""
    n = 9
    columns: list[Any] = [
        pyarrow.array([[text] for text in texts[:n]]),
        pyarrow.array([{"a": text} for text in texts[:n]]),
        pyarrow.array(range(n)),
        pyarrow.array([1.5] * n),
        pyarrow.array([True] * n),
        pyarrow.array([text.encode() for text in texts[:n]]),
        pyarrow.array([b"ab"] * n, pyarrow.binary(2)),
        pyarrow.array(range(n)).dictionary_encode(),
        pyarrow.nulls(n),
    ]
    path = directory / "b.parquet"
    if rng.random() < 0.2:
        path.write_bytes(table_bytes(pyarrow.array(texts), name="body"))
    else:
        path.write_bytes(table_bytes(rng.choice(columns)))
    return refused(form, beside_good(rng, directory, form, texts, path), str(path))


@oddity("parquet", "txt", "jsonl", "txt.gz", "txt.zst")
def not_utf8(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """Bytes that are no UTF-8 where a text is said to be."""
    bad = rng.choice(
        [b"\xff", b"\xe9t\xe9", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82"]
    )
    rows = [text.encode() for text in texts]
    rows.insert(rng.randrange(len(rows)), b"a " + bad + b" b")
    path = directory / f"b.{form}"
    if form == "parquet":
        column = pyarrow.array(rows, pyarrow.binary()).view(pyarrow.string())
        path.write_bytes(table_bytes(column))
    elif form == "jsonl":
        path.write_bytes(
            b"".join(
                b'{"text": "' + row.replace(b"\\", b"").replace(b'"', b"") + b'"}\n' for row in rows
            )
        )
    else:
        path.write_bytes(packed(form, b"\n".join(rows) + b"\n", rng))
    return refused(form, beside_good(rng, directory, form, texts, path), str(path))


@oddity("jsonl", "json", "txt", "parquet", "jsonl.gz", "txt.zst")
def no_file(rng: random.Random, directory: Path, form: str, texts: list[str]) -> Drawn:
    """Something that is no file to be read, named or found by a glob."""
    path = directory / f"b.{form}"
    what = rng.choice(
        [
            "fifo",
            "socket",
            "dangling",
            "loop",
            "missing",
            "empty",
            "blank",
            "unreadable",
            "directory",
        ]
    )
    if what == "fifo":
        os.mkfifo(path)
    elif what == "socket":
        bound(path)
    elif what == "dangling":
        path.symlink_to("nowhere")
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "empty" or (what == "unreadable" and os.geteuid() == 0):
        path.touch()
    elif what == "blank":
        path.write_text(" \n\n\t\n")
    elif what == "unreadable":
        write(rng, path, form, texts).chmod(0)
    elif what == "directory":
        path.mkdir()
    paths = beside_good(rng, directory, form, texts, path)
    by_glob = what not in ("missing", "directory") and rng.random() < 0.5
    words = words_of(form, [directory / f"*.{form}"] if by_glob else paths)
    return Drawn("", paths, words, None, [str(path)])


def bound(path: Path) -> None:
    """Make a socket in the file system, whose names may not be as long as a path."""
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)
