"""Directories in data.paths: which files are read, and reasons of the skipped files."""

import gzip
import json
import os
import re
from codecs import BOM_UTF8
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from sample_texts import json_lines, opened, texts
from tiers import pairs

from diffllm.core.errors import DataError
from diffllm.data.text import files
from diffllm.data.text.file_index import COMPRESSIONS, TEXT_FORMAT_BY_SUFFIX

TREE = {
    "z.md": b"z",
    "a/b.py": b"b = 'more bytes than d.jsonl'",
    "a/c/d.jsonl": b'{"text": "d"}',
    "a/e": b"e",
    "a/package.json": b'{\n  "name": "a"\n}',
    "a/tags.json": b'{"name": "a", "id": 1}',
    "a.csv": b"f,g",
    "blank.txt": b" \n",
    "image.png": b"\x89PNG",
    "latin.txt": b"\xe9",
    "tokens.bin": b"0",
    ".hidden": b"h",
    ".git/config": b"h",
    "a/.h/i.txt": b"h",
}


def write_tree(root: Path, tree: dict[str, bytes]) -> Path:
    for name, content in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_corpus_of_directory_has_all_text_files_sorted_by_path(tmp_path, make_config, monkeypatch):
    docs = write_tree(tmp_path / "home" / "docs", TREE)
    (docs / "a" / "loop").symlink_to(docs)
    (docs / "y").symlink_to(docs / "a")
    (docs / "gone").symlink_to(tmp_path / "none")
    os.mkfifo(docs / "pipe")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = opened(make_config(Path("~/docs")))
    assert found.description == "4 plain text files in docs/"
    assert list(found.texts()) == ["f,g", "b = 'more bytes than d.jsonl'", "e", "z"]
    reasons = {str(path.relative_to(docs)): reason for path, reason in found.skipped.items()}
    assert next(iter(reasons)) == "a/c/d.jsonl", "the choice of a kind comes first"
    assert reasons.pop("tokens.bin").startswith("unsupported format")
    assert reasons == {
        "a/c/d.jsonl": "JSON; of docs/, only plain text is read (34 of 47 bytes)",
        "a/package.json": "neither an array nor a JSON object per line",
        "a/tags.json": "no row has data.text_column=text (columns: name, id)",
        "image.png": "not UTF-8 text",
        "latin.txt": "not UTF-8 text",
        "gone": "not a regular file",
        "pipe": "not a regular file",
        "blank.txt": "the file is empty",
        ".hidden": "hidden",
        ".git": "hidden",
        "a/.h": "hidden",
    }
    assert (found.skipped_empty, found.skipped_undecodable) == (1, 11)
    names = ["a.csv", "a/b.py", "a/e", "z.md"]
    docs.rename(tmp_path / "moved")
    others = ([tmp_path / "moved"], [tmp_path / "mov*"], [tmp_path / "moved" / n for n in names])
    for paths in others:
        assert opened(make_config(*paths)).identity == found.identity
    (tmp_path / "moved" / "new.rst").write_text("new", encoding="utf-8")
    assert opened(make_config(tmp_path / "moved")).identity != found.identity
    assert list(opened(make_config(tmp_path / "moved" / "*.md")).texts()) == ["z"]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({".hidden": b"h"}, "has no text file, .parquet file or .jsonl file"),
        ({"a.png": b"\x89PNG", "b.txt": b"\n"}, "has no text file, .parquet file or .jsonl file"),
        ({"a.bin": b"0", "a.idx": b"0"}, "file; data=tokens reads its token files"),
        ({"t.bin": b"0", "manifest.json": b"{}"}, "file; data=tokens reads its token files"),
    ],
)
def test_directory_without_text_files_raises_error_with_path(tmp_path, make_config, tree, said):
    (tmp_path / "docs").mkdir()
    with pytest.raises(DataError) as caught:
        opened(make_config(write_tree(tmp_path / "docs", tree)))
    assert re.fullmatch(rf"data.paths.*{tmp_path}/docs.*{re.escape(said)}.*", str(caught.value))


@pytest.mark.parametrize("tree", [["a.txt"], ["a.md", "b.py"], ["a.csv", "b.txt.gz", "p.json"]])
@pytest.mark.parametrize("column", [{"text_column": "body"}, {"prompt_column": "body"}])
def test_column_key_with_only_text_files_raises_error_with_fix(tmp_path, make_config, tree, column):
    (tmp_path / "docs").mkdir()
    content = {"b.txt.gz": gzip.compress(b"text"), "p.json": b"{}"}
    contents = {name: content.get(name, b"text") for name in tree}
    docs = write_tree(tmp_path / "docs", contents)
    (key,) = column
    for paths in ([docs], [docs / tree[0]]):
        with pytest.raises(DataError) as caught:
            opened(make_config(*paths, **column))
        assert f"data.{key}=body needs files with columns" in str(caught.value)
        assert str(caught.value).endswith(f"plain text has no columns; remove data.{key}")
    rows = docs / "c.jsonl"
    rows.write_text(json_lines("x", column="body"), encoding="utf-8")
    (docs / "long.md").write_text("text without columns " * 100, encoding="utf-8")
    if key == "text_column":
        assert texts(make_config(docs, **column)) == ["x"]
        assert texts(make_config(docs / tree[0], rows, **column)) == ["text", "x"]


JSON_ENDINGS = [name for name, kind in TEXT_FORMAT_BY_SUFFIX.items() if kind == "json"]
LEADS = (b"", BOM_UTF8, b"\n", b"\r\n", BOM_UTF8 + b" \n\n")


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(
    ("ending", "packed", "array"), pairs(JSON_ENDINGS, ["", *COMPRESSIONS], [True, False])
)
def test_directory_reads_json_files_like_listed_files(tmp_path, make_config, ending, packed, array):
    rows: list[dict[str, Any]] = [{"id": 0}, {"text": "one"}, {"text": "two"}]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    content = (json.dumps(rows, indent=1) if array else lines).encode()
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed]
    for number, lead in enumerate(LEADS):
        file = tmp_path / str(number) / f"a{ending}{packed}"
        file.parent.mkdir()
        file.write_bytes(compress(lead + content))
        for path in (file, file.parent):
            assert texts(make_config(path)) == [None, "one", "two"], (lead, path)


def write_kind(directory: Path, kind: str, documents: int) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / {"parquet": "a.parquet", "json": "b.jsonl", "text": "README.md"}[kind]
    rows = [f"{kind} {number}" for number in range(documents)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path)
    else:
        path.write_text(json_lines(*rows) if kind == "json" else "\n".join(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(("most", "least"), list(permutations(files.FORMAT_NAMES, 2)))
def test_directory_is_read_as_the_kind_with_the_most_bytes(tmp_path, make_config, most, least):
    docs, notes = tmp_path / "docs", tmp_path / "docs" / "notes"
    larger, smaller = write_kind(docs, most, 1000), write_kind(docs, least, 1)
    corpus = opened(make_config(docs))
    assert corpus.identity == opened(make_config(larger)).identity
    assert corpus.description == f"1 {files.FORMAT_NAMES[most]} file in docs/"
    (reason,) = corpus.skipped.values()
    assert list(corpus.skipped) == [smaller]
    assert reason.startswith(
        f"{files.FORMAT_NAMES[least]}; of docs/, only {files.FORMAT_NAMES[most]} is read ("
    )
    both = opened(make_config(*sorted((larger, smaller))))
    assert opened(make_config(docs, smaller)).identity == both.identity
    # A listed subdirectory has its own kind, before or after its parent.
    smaller.unlink()
    write_kind(notes, least, 1)
    assert not opened(make_config(docs, notes)).skipped
    assert not opened(make_config(notes, docs)).skipped


@pytest.mark.parametrize(
    ("entries", "read", "skipped"),
    [
        (["*"], ["parquet"], ["text"]),
        (["**"], ["parquet"], ["text"]),
        (["**/*"], ["parquet"], ["text"]),
        (["a.parquet", ""], ["parquet"], ["text"]),
        (["", "README.md"], ["text", "parquet"], []),
        (["*", "README.md"], ["text", "parquet"], []),
        (["*.md"], ["text"], []),
        (["*.md", "*.parquet"], ["text", "parquet"], []),
        (["*.md", "a.parquet"], ["text", "parquet"], []),
        (["*.md", "*"], ["text", "parquet"], []),
    ],
)
def test_entry_of_paths_reads_one_kind_and_listed_files_of_a_directory(
    tmp_path, make_config, entries, read, skipped
):
    """Each entry reads one kind of its files; a file with its own entry counts for all entries."""
    docs = tmp_path / "docs"
    paths = {kind: write_kind(docs, kind, size) for kind, size in (("parquet", 2000), ("text", 9))}
    corpus = opened(make_config(*(docs / entry for entry in entries)))
    assert corpus.identity == opened(make_config(*sorted(paths[kind] for kind in read))).identity
    assert list(corpus.skipped) == [paths[kind] for kind in skipped]


def test_glob_skips_unusable_files_like_a_directory(tmp_path, make_config):
    docs = write_tree(tmp_path / "docs", TREE)
    (docs / "gone").symlink_to(tmp_path / "none")
    os.mkfifo(docs / "pipe")
    whole, matches = opened(make_config(docs)), opened(make_config(docs / "*"))
    for path, reason in whole.skipped.items():
        if path.parent == docs and reason != "hidden":
            assert matches.skipped[path] == reason


def test_directory_with_equal_bytes_of_two_kinds_is_read_as_the_first_kind(tmp_path, make_config):
    size = write_kind(tmp_path / "docs", "json", 3).stat().st_size
    (tmp_path / "docs" / "a.txt").write_text("x" * size, encoding="utf-8")
    assert texts(make_config(tmp_path / "docs")) == ["json 0", "json 1", "json 2"]


def test_directory_next_to_files_that_a_glob_matches_is_listed_as_skipped(tmp_path, make_config):
    write_tree(tmp_path / "docs", {"a.txt": b"a", "sub/b.txt": b"b"})
    corpus = opened(make_config(tmp_path / "docs" / "*"))
    assert list(corpus.texts()) == ["a"]
    reason = f"a directory, and {tmp_path}/docs/* also matches files"
    assert corpus.skipped == {tmp_path / "docs" / "sub": reason}
    for patterns in (["**"], ["*/*"], ["*", "sub"]):
        paths = [tmp_path / "docs" / pattern for pattern in patterns]
        assert not opened(make_config(*paths)).skipped, patterns
