import gzip
import os
import re
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from runs.json_files import write_json
from sample_texts import json_lines, opened, texts

import diffllm
from diffllm.core.errors import DataError
from diffllm.data.config import DataConfig, SampleBy
from diffllm.data.text import file_index, files, readers
from diffllm.data.text.file_index import combined_hash, file_facts


def test_stdlib_corpus_counts_blank_and_undecodable_files(tmp_path, make_config, monkeypatch):
    root = tmp_path / "stdlib"
    contents = {
        "b.py": b"b = 1\n",
        "a/z.py": b"z = '\xc3\xa9'\n",
        "empty.py": b"",
        "blank.py": b" \n\n",
        "latin.py": b"# \xe9\n",
        "site-packages/other.py": b"other = 1\n",
        "a/__pycache__/cached.py": b"cached = 1\n",
        "readme.txt": b"text\n",
    }
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    cfg = make_config(source="stdlib")
    assert texts(cfg) == ["z = 'é'\n", "b = 1\n"]
    assert (opened(cfg).skipped_empty, opened(cfg).skipped_undecodable) == (2, 1)


def test_zst_corpus_file_is_read_completely_or_refused(tmp_path, make_config):
    path, skippable = tmp_path / "a.jsonl.zst", b"\x50\x2a\x4d\x18\x05\0\0\0hello"
    first, second = (zstandard.compress(json_lines(text).encode()) for text in ("one", "two"))
    path.write_bytes(skippable + first + skippable + second + skippable)
    assert texts(make_config(path)) == ["one", "two"]
    for cut in (1, len(second) // 2, len(second) - 1):
        path.write_bytes(first + second[:-cut])
        with pytest.raises(DataError, match="cannot be decompressed as zstd: Truncated"):
            texts(make_config(path))
    # pyarrow reads windows of up to 128 MiB.
    parameters = zstandard.ZstdCompressionParameters(window_log=28, hash_log=6, chain_log=6)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(stream.compress(json_lines("one").encode()) + stream.flush())
    with pytest.raises(DataError, match=r"a.jsonl.zst .*too much memory"):
        texts(make_config(path))


def test_json_lines_corpus_reads_all_files_that_match_a_glob(tmp_path, make_config):
    for name in ("b", "a"):
        lines = json_lines(name, None, column="body")
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    cfg = make_config(tmp_path / "*.jsonl", tmp_path / "a.jsonl", text_column="body")
    assert texts(cfg) == ["a", None, "b", None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt cannot be used as text: the file is empty"),
        ("a.txt", b"\xe9t\xe9\n", "a.txt cannot be used as text: not UTF-8 text"),
        ("a.txt.gz", b"plain", "a.txt.gz cannot be decompressed as gzip"),
        ("a.py", b"\xe9t\xe9\n", "a.py cannot be used as text: not UTF-8 text"),
        (
            "a.md.gz",
            b"text\n",
            "a.md.gz cannot be used as text: unsupported format; data=files reads .parquet",
        ),
        ("a.bin", b"text\n", "other text, data=tokens .bin and .ds"),
        (
            "a.json",
            b'["a", "b"]',
            "the file must be an array of objects, with text under data.text_column=text",
        ),
        ("a.json", b"[]", "a.json cannot be read: the file must be an array of objects"),
    ],
)
def test_unusable_file_raises_short_error_with_path(tmp_path, make_config, name, content, message):
    good = tmp_path / "good.jsonl"
    good.write_text(json_lines("fine"), encoding="utf-8")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        texts(make_config(good, tmp_path / name))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "end"),
    [
        ({"id": 1, "body": "x"}, "id, body); use data.text_column=body"),
        (
            {"question": "q", "answer": "a", "id": 1},
            "question, answer, id); use data.text_column=question or data.text_column=answer",
        ),
        ({"id": 1, "size": 2}, "id, size); none of them contains text"),
    ],
)
def test_error_for_missing_parquet_column_suggests_text_columns(tmp_path, make_config, row, end):
    table = pyarrow.table({name: [value] for name, value in row.items()})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        texts(make_config(tmp_path / "a.parquet"))
    said = f"a.parquet has no column 'text' that contains text (columns: {end}"
    assert str(caught.value).endswith(said)


def test_json_array_corpus_reads_only_the_text_column(tmp_path, make_config):
    path = tmp_path / "a.json"
    write_json(path, [{"id": 1}, {"text": "a", "meta": 1}, {"text": "b", "meta": "x"}])
    assert texts(make_config(path)) == [None, "a", "b"]
    write_json(path, [{"text": "a"}, {"text": 1}])
    with pytest.raises(DataError, match=r"a.json cannot be read: column 'text' contains int, not"):
        texts(make_config(path))


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 22])
def test_documents_do_not_depend_on_block_size(tmp_path, make_config, monkeypatch, block_bytes):
    documents = ["one", "two\r\nlines é\u2028", "a" * 50, " ", "b"]
    monkeypatch.setattr(readers, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(files, "PART_BYTES", 30)
    (tmp_path / "a.jsonl").write_text(json_lines(*documents), encoding="utf-8")
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(json_lines(*documents).encode()))
    assert texts(make_config(tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst")) == documents * 2
    (tmp_path / "c.txt").write_bytes("one\r\ntwo é\n\nthree\n\n\n\nfour".encode())
    by = {
        SampleBy.line: ["one", "two é", "", "three", "", "", "", "four"],
        SampleBy.paragraph: ["one\ntwo é", "three", "four"],
        SampleBy.document: ["one\ntwo é\n\nthree\n\n\n\nfour"],
    }
    for sample_by, expected in by.items():
        found = texts(make_config(tmp_path / "c.txt", sample_by=sample_by))
        assert [text for text in found if text] == [text for text in expected if text]


def test_data_paths_glob_without_matches_raises_error_with_glob(tmp_path, make_config):
    for path in (tmp_path / "none.txt", tmp_path / "*.parquet"):
        with pytest.raises(DataError, match=re.escape(f"{path} matches no file")):
            opened(make_config(path))


def test_hub_dataset_keeps_first_commit_if_branch_changes(tmp_path, make_config, monkeypatch):
    import huggingface_hub

    commits = iter(["a" * 40, "b" * 40])

    class Info:
        sha = next(commits)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: Info())
    cfg = make_config(source="hub", dataset="someone/corpus")
    first = opened(cfg)
    assert "someone/corpus@" + "a" * 12 in first.description
    Info.sha = next(commits)
    assert opened(cfg).identity == first.identity
    pinned = make_config(source="hub", dataset="someone/corpus", revision="b" * 40)
    assert opened(pinned).identity != first.identity


def test_corpus_identity_does_not_depend_on_file_name_or_modification_time(tmp_path, make_config):
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("one\ntwo\n", encoding="utf-8")
    second.write_text("one\ntwo\n", encoding="utf-8")
    os.utime(second, (0, 0))
    identity = opened(make_config(first)).identity
    assert opened(make_config(second)).identity == identity
    second.write_text("one\ntwo!\n", encoding="utf-8")
    assert opened(make_config(second)).identity != identity
    assert opened(make_config(first, sample_by=SampleBy.document)).identity != identity


def test_unchanged_corpus_file_is_not_hashed_again(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one", encoding="utf-8")
    facts = file_facts([path], tmp_path / "cache")
    monkeypatch.setattr(file_index, "_read_facts", lambda _: pytest.fail("read again"))
    assert file_facts([path], tmp_path / "cache") == facts


def test_hub_dataset_name_that_is_a_local_path_is_refused(workplace, make_config):
    """The datasets library would read the directory, and run a script of the same name."""
    (workplace / "corpus").mkdir()
    for name in ("corpus", "./corpus", str(workplace / "corpus"), "~/nowhere", "a/b/c"):
        with pytest.raises(DataError, match=f"data.dataset={name} must be the name of a hub"):
            opened(make_config(source="hub", dataset=name))


def test_data_modules_never_set_trust_remote_code_for_hub_datasets():
    sources = [
        path.read_text(encoding="utf-8")
        for path in Path(diffllm.__file__).parent.glob("data/**/*.py")
    ]
    assert any("load_dataset" in source for source in sources)
    assert not any("trust_remote_code" in source for source in sources)


MARK = b"\xef\xbb\xbf"
LINES = b"one\n\ntwo\n\nthree \xef\xbb\xbf within\n"
ROWS = json_lines("one", "two").encode()


@pytest.mark.parametrize(
    ("name", "content", "sample_by"),
    [
        *((name, LINES, by) for name in ("a.txt", "a.txt.gz", "a.txt.zst") for by in SampleBy),
        *((name, ROWS, SampleBy.line) for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst")),
        ("a.json", b'[{"text": "one"}, {"text": "two"}]', SampleBy.line),
    ],
)
def test_byte_order_mark_of_a_file_is_not_part_of_its_documents(
    tmp_path, make_config, name, content, sample_by
):
    packed = {"gz": gzip.compress, "zst": zstandard.compress}.get(name[-3:].strip("."), bytes)
    cfgs = []
    for folder, mark in (("without", b""), ("with", MARK)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(packed(mark + content))
        cfgs.append(make_config(tmp_path / folder / name, sample_by=sample_by))
    plain, marked = cfgs
    assert texts(marked) == texts(plain)
    assert "\ufeff" not in str(texts(marked)[0])[:3]


def test_corpus_identity_has_not_changed_for_files_without_byte_order_mark(tmp_path, make_config):
    def of_before(cfg: DataConfig, path: Path) -> str:
        (facts,) = file_facts([path], Path(cfg.cache_dir))
        return combined_hash(["files", "text", cfg.sample_by.value, [[facts.sha256, "text"]]])

    for name, mark, same in (("a.txt", b"", True), ("b.txt", MARK, False)):
        (tmp_path / name).write_bytes(mark + LINES)
        cfg = make_config(tmp_path / name)
        assert (opened(cfg).identity == of_before(cfg, tmp_path / name)) is same
