import hashlib
import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from processes import PATIENCE_S
from runs.json_files import read_json, write_jsonl
from sample_texts import contents, documents_of, sample_documents
from tiers import pairs

from diffllm.cli.prepare import prepared_text
from diffllm.core.errors import DataError
from diffllm.data.config import SampleBy
from diffllm.data.preparation.prepare import RunHashes, held_out_pieces, prepare
from diffllm.data.prepared import TokenData
from diffllm.data.text.corpus import open_corpus
from diffllm.data.text.skipped import report_again, skipped_text

PREPARE = """
import sys
from diffllm.data.preparation import encoding
from diffllm.data.preparation import prepare as preparation
from diffllm.data.config import DataConfig, SampleBy
corpus, cache, stage = sys.argv[1:]
if stage != "all":
    import time
    def hang(*args, **kwargs):
        print("here", flush=True)
        time.sleep(600)
    add = encoding.ShardWriter.add
    encoding.ShardWriter.add = lambda *args: (add(*args), hang())
cfg = DataConfig(source="files", paths=[corpus], cache_dir=cache, vocab_size=400,
                 sample_by=SampleBy.line)
print(preparation.prepare(cfg).directory)
"""


def start_preparing(corpus: Path, cache: Path, stage: str = "all") -> subprocess.Popen[str]:
    """Prepare in a subprocess, which hangs at the first shard unless `stage` is "all"."""
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(corpus), str(cache), stage],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def test_train_and_heldout_splits_together_contain_all_documents(prepared):
    train, heldout = documents_of(prepared, "train"), documents_of(prepared, "heldout")
    assert sorted(train + heldout) == sorted(sample_documents(200))
    assert 5 <= len(heldout) <= 45


def test_manifest_matches_tokenizer_and_shard_files_on_disk(prepared):
    manifest = prepared.manifest
    tokenizer = prepared.tokenizer()
    assert (manifest.vocab_size, manifest.eos_id) == (400, tokenizer.eos_id)
    assert manifest.pieces_hash == tokenizer.pieces_hash
    assert manifest.dtype == "uint16"
    for name, split in manifest.splits.items():
        texts = documents_of(prepared, name)
        assert split.documents == len(texts)
        assert split.bytes == sum(len(text.encode()) for text in texts)
        assert split.tokens == len(prepared.split(name)) == sum(s.tokens for s in split.shards)
        for shard in split.shards:
            content = (prepared.directory / shard.file).read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard.sha256
    stored = read_json(prepared.directory / "manifest.json")
    assert stored == asdict(manifest)


def test_heldout_texts_do_not_depend_on_document_order_or_duplicates(tmp_path, make_config):
    texts = sample_documents(100)
    forwards, backwards = tmp_path / "forwards.txt", tmp_path / "backwards.txt"
    forwards.write_text("\n".join(texts), encoding="utf-8")
    backwards.write_text("\n".join(reversed(texts + texts[:50])), encoding="utf-8")
    first = prepare(make_config(forwards, heldout_fraction=0.4))
    second = prepare(make_config(backwards, heldout_fraction=0.4))
    assert set(documents_of(first, "heldout")) == set(documents_of(second, "heldout"))
    assert not set(documents_of(second, "heldout")) & set(documents_of(second, "train"))
    assert len(documents_of(second, "heldout")) > len(documents_of(first, "heldout"))


def test_prepare_excludes_and_counts_blank_documents(tmp_path, make_config):
    texts: list[str | None] = [*sample_documents(30), "", " \n\u00a0", None]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in texts])
    data = prepare(make_config(corpus, vocab_size=300))
    assert data.manifest.skipped_empty == 3
    assert sum(split.documents for split in data.manifest.splits.values()) == 30


def test_prepare_names_each_skipped_file_once(tmp_path, make_config, prepared, capsys):
    docs = tmp_path / "docs"
    docs.mkdir()
    write_jsonl(docs / "a.jsonl", [{"text": text} for text in sample_documents(30)])
    for number in range(12):
        (docs / f"{number:02}.md").write_text("a note", encoding="utf-8")
    cfg = make_config(docs, tokenizer=str(prepared.directory))

    def printed() -> list[str]:
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if "skipped" in line]

    data = prepare(cfg)
    first, *messages = printed()
    listing = data.directory / "skipped.txt"
    assert first.startswith(f"data.paths: skipped 12 entries of directories, listed in {listing};")
    listed = listing.read_text(encoding="utf-8").splitlines()
    assert messages == [*(f"skipped {line}" for line in listed[:10]), "skipped 2 more"]
    reason = "plain text; of docs/, only JSON is read ("
    expected = [f"{docs}/{number:02}.md: {reason}" for number in range(12)]
    assert [line[: len(start)] for line, start in zip(listed, expected, strict=True)] == expected
    assert data.manifest.skipped_undecodable == 12
    prepare(cfg)
    assert not printed()
    # The text is the same, so the prepared tokens are reused.
    (docs / "README.md").write_text("more", encoding="utf-8")
    assert prepare(cfg).directory == data.directory
    assert printed()[-1] == "skipped 3 more"
    assert f"{docs}/README.md: " in listing.read_text(encoding="utf-8")
    text = f"data.paths: skipped 13 entries of directories, listed in {listing}"
    assert skipped_text(data.directory) == text
    assert "12 other files" not in prepared_text(data)
    assert text in prepared_text(data)


def test_one_of_several_processes_prints_changed_list_of_skipped_files(tmp_path, capsys):
    skipped = {tmp_path / "a.md": "hidden"}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: report_again(skipped, tmp_path), range(8)))
    assert capsys.readouterr().err.count("data.paths: skipped 1 entry") == 1
    # The lock of a read-only cache cannot be opened.
    lock = Path(f"{tmp_path}.lock")
    lock.unlink()
    lock.mkdir()
    report_again({}, tmp_path)
    assert not capsys.readouterr().err
    assert skipped_text(tmp_path).startswith("data.paths: skipped 1 entry")


@pytest.mark.parametrize(
    ("trains_tokenizer", "prompt_column", "names"),
    pairs([True, False], [None, "before"], [("a.jsonl", "b.json", "c.md"), ("a.jsonl", "c.md")]),
)
def test_prepare_returns_cached_tokens_of_older_version(
    tmp_path, make_config, prepared, trains_tokenizer, prompt_column, names
):
    """Older versions read all kinds of files in a directory, but skipped most .json files."""
    rows = [json.dumps({"before": "a prompt", "text": text}) for text in sample_documents(60)]
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, content in (("a.jsonl", rows[:40]), ("b.json", rows[40:]), ("c.md", ["a note"])):
        (docs / name).write_text("\n".join(content), encoding="utf-8")
    if prompt_column:
        names = [name for name in names if name != "c.md"]
    tokenizer = None if trains_tokenizer else str(prepared.directory)
    more = {"vocab_size": 300, "tokenizer": tokenizer, "prompt_column": prompt_column}
    # With listed files, the corpus has the hash that an older version gave the directory.
    former = prepare(make_config(*(docs / name for name in names), **more))
    cfg = make_config(docs, **more)
    assert prepare(cfg, run_hashes=RunHashes(corpus=former.manifest.corpus)) == former
    now = prepare(cfg)
    assert now.manifest.corpus != former.manifest.corpus or names == ["a.jsonl", "b.json"]
    # The tokens are not those of an edited corpus.
    (docs / "a.jsonl").write_text("\n".join(rows[1:40]), encoding="utf-8")
    edited = prepare(cfg, run_hashes=RunHashes(corpus=former.manifest.corpus))
    assert edited.manifest.corpus not in (former.manifest.corpus, now.manifest.corpus)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("content", ['{"text": ""}\n', '{"text": null}\n{"text": " "}\n'])
def test_prepare_refuses_corpus_of_blank_documents(tmp_path, make_config, prepared, content, given):
    (tmp_path / "a.jsonl").write_text(content, encoding="utf-8")
    tokenizer = str(prepared.directory) if given else None
    with pytest.raises(DataError, match=r"1 file: a.jsonl: no document contains text"):
        prepare(make_config(tmp_path / "a.jsonl", tokenizer=tokenizer))
    assert not list((tmp_path / "cache" / "tokens").glob("*/manifest.json"))


@pytest.mark.parametrize(
    ("text", "fraction", "end"),
    [
        ("one two three four five", 0.2, "four five"),
        ("one two three\nfour five six", 0.4, "four five six"),
        ("a" * 50, 0.2, "a" * 10),
        ("one\ntwo\n" + "b" * 42 + "\n \n", 0.2, "b" * 10 + "\n \n"),
    ],
)
def test_heldout_text_of_single_document_starts_at_expected_position(
    tmp_path, make_config, text, fraction, end
):
    path = tmp_path / "corpus.txt"
    path.write_text(text, encoding="utf-8")
    corpus = open_corpus(make_config(path, sample_by=SampleBy.document), tmp_path / "cache")
    cut = held_out_pieces(corpus, fraction)
    assert cut is not None
    assert list(cut.texts()) == [text[: -len(end)], end]
    assert len(cut.parts) == 2


def test_cache_directory_depends_on_settings_that_affect_tokens(tmp_path, corpus_file, make_config):
    base = prepare(make_config(corpus_file))
    assert prepare(make_config(corpus_file)).directory == base.directory
    for changes in (
        {"vocab_size": 410},
        {"heldout_fraction": 0.3},
        {"tokenizer_sample_bytes": 9000},
    ):
        assert prepare(make_config(corpus_file, **changes)).directory != base.directory
    corpus_file.write_text("\n".join(sample_documents(150, seed=1)), encoding="utf-8")
    assert prepare(make_config(corpus_file)).directory != base.directory


def test_concurrent_preparations_write_the_corpus_only_once(tmp_path, corpus_file, make_config):
    processes = [start_preparing(corpus_file, tmp_path / "shared") for _ in range(3)]
    outputs = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    (directory,) = {stdout.strip() for stdout, _ in outputs}
    lines = [line for _, stderr in outputs for line in stderr.splitlines()]
    said = sorted(line.split()[0] for line in lines if not line.startswith("waiting for "))
    assert said == ["prepared", "preparing", "training"]
    alone = prepare(make_config(corpus_file))
    assert contents(TokenData(Path(directory))) == contents(alone)


def test_waiting_preparation_continues_after_lock_holder_is_killed(tmp_path, corpus_file):
    first = start_preparing(corpus_file, tmp_path / "cache", "writing")
    assert first.stdout is not None
    first.stdout.readline()
    second = start_preparing(corpus_file, tmp_path / "cache")
    assert second.stderr is not None
    who = f"process {first.pid} on {socket.gethostname()}"
    what = f"waiting for {who}, which prepares {tmp_path / 'cache' / 'tokens'}/"
    assert what in second.stderr.readline()
    first.kill()
    first.communicate()
    stdout, stderr = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, stderr
    assert (Path(stdout.strip()) / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "021af93c8e0912625ef54a2b08e4a83a"),
        ({"heldout_fraction": 0.3}, "cfbfb248de23b137ab2f695b8aaef059"),
    ],
)
def test_cache_key_of_corpus_matches_stored_value(tmp_path, make_config, changes, key):
    (tmp_path / "a.txt").write_text(
        "".join(f"Line {i} says {i * i % 97}.\n" for i in range(400)), encoding="utf-8"
    )
    data = prepare(make_config(tmp_path / "a.txt", vocab_size=284, **changes))
    assert data.directory.name == key
