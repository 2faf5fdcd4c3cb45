"""Preparation in several processes, and recovery after the death of a process."""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from processes import has_ended, wait_until
from sample_texts import json_lines, sample_documents

from diffllm.core.errors import DataError
from diffllm.core.printing import to_stderr
from diffllm.data.config import DataConfig
from diffllm.data.preparation import encoding, workers
from diffllm.data.preparation.encoding import Document, document_hashes
from diffllm.data.preparation.prepare import prepare
from diffllm.data.preparation.tokens import TokensJob
from diffllm.data.preparation.workers import PrepareConfig
from diffllm.data.prepared import TokenData
from diffllm.data.text import files
from diffllm.data.text.corpus import Part, TextBatch, open_corpus

TEXTS = sample_documents(1200)


@pytest.fixture
def cfg(
    tmp_path: Path, make_config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> DataConfig:
    """A corpus of about ten parts: row groups, lines and JSON lines."""
    monkeypatch.setattr(files, "PART_BYTES", 12_000)
    table = pyarrow.table({"text": TEXTS[:400]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    (tmp_path / "b.jsonl").write_text(json_lines(*TEXTS[400:800]), encoding="utf-8")
    (tmp_path / "c.txt").write_text("\n".join(TEXTS[800:]), encoding="utf-8")
    model = tmp_path / "tokenizer.txt"
    model.write_text("\n".join(TEXTS), encoding="utf-8")
    tokenizer = prepare(make_config(model, cache_dir=str(tmp_path / "other"))).directory
    paths = [tmp_path / name for name in ("a.parquet", "b.jsonl", "c.txt")]
    return make_config(*paths, tokenizer=str(tokenizer), heldout_fraction=0.3)


def hash_of(text: str) -> int:
    return int(document_hashes([Document(text.encode(), b"")])[0]) + encoding.HASH_OFFSET


def all_contents(data: TokenData) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.directory.glob("[!.]*")}


def in_cache(cfg: DataConfig, name: str) -> DataConfig:
    return replace(cfg, cache_dir=f"{cfg.cache_dir}-{name}")


def partial_of(cfg: DataConfig) -> Path:
    (found,) = Path(cfg.cache_dir).glob("tokens/*.partial-*")
    return found


def test_preparation_in_three_processes_writes_tokens_in_corpus_order(cfg):
    data = prepare(cfg, PrepareConfig(processes=3))
    tokenizer = data.tokenizer()
    parts = open_corpus(cfg, Path(cfg.cache_dir)).parts
    assert 8 <= len(parts) <= 20
    for split in ("train", "heldout"):
        chosen = [
            text for text in TEXTS
            if (hash_of(text) < 0.3 * 2**64) == (split == "heldout")
        ]  # fmt: skip
        expected = [id for text in chosen for id in (*tokenizer.encode(text), tokenizer.eos_id)]
        stream = data.split(split)
        np.testing.assert_array_equal(stream.tokens(0, len(stream)), expected)
        assert data.manifest.splits[split].documents == len(chosen)
        assert data.manifest.splits[split].bytes == sum(len(text.encode()) for text in chosen)


def test_number_of_preparation_processes_does_not_change_written_bytes(cfg):
    alone = all_contents(prepare(cfg, PrepareConfig(processes=1)))
    several = in_cache(cfg, "several")
    assert all_contents(prepare(several, PrepareConfig(processes=4))) == alone


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Make the process that encodes part `number` send itself a signal after the first batch."""
    encode = encoding.Encoding.encode

    def arrange(number: int, sent: int) -> None:
        def encode_or_die(self: encoding.Encoding, here: int, *args: Any) -> None:
            if here == number:
                add = encoding.ShardWriter.add
                encoding.ShardWriter.add = lambda *args: (add(*args), os.kill(os.getpid(), sent))  # type: ignore[assignment, method-assign]
            encode(self, here, *args)

        monkeypatch.setattr(encoding.Encoding, "encode", encode_or_die)

    yield arrange
    monkeypatch.setattr(encoding.Encoding, "encode", encode)


def test_resumed_preparation_does_not_rewrite_finished_parts(cfg, dying, monkeypatch):
    undisturbed = all_contents(prepare(in_cache(cfg, "undisturbed")))
    dying(5, signal.SIGKILL)
    with pytest.raises(
        DataError, match=r"was killed, perhaps because memory ran out; files in progress: .*\.jsonl"
    ):
        prepare(cfg, PrepareConfig(processes=1))
    partial = partial_of(cfg)
    done = sorted(path.name for path in partial.glob("part-*.json"))
    assert done == [f"part-{i:05d}.json" for i in range(5)]
    shards = {path: path.stat().st_mtime_ns for path in partial.glob("tokens/*-0000[0-4]-*.bin")}
    monkeypatch.undo()
    monkeypatch.setattr(files, "PART_BYTES", 12_000)
    data = prepare(cfg)
    assert all_contents(data) == undisturbed
    for path, time_ns in shards.items():
        assert (data.directory / path.name).stat().st_mtime_ns == time_ns  # not written again
    assert not list(Path(cfg.cache_dir).glob("tokens/*.partial-*"))


def test_resumed_preparation_ignores_parts_if_part_size_changed(cfg, dying, monkeypatch):
    dying(2, signal.SIGKILL)
    with pytest.raises(DataError, match="killed"):
        prepare(cfg, PrepareConfig(processes=1))
    monkeypatch.undo()
    data = prepare(cfg)  # now a single part
    assert len(data.manifest.splits["train"].shards) == 1
    assert all_contents(data) == all_contents(prepare(in_cache(cfg, "whole")))
    assert not list(Path(cfg.cache_dir).glob("tokens/*.partial-*"))


def test_error_of_preparation_worker_contains_exactly_one_traceback(cfg, monkeypatch):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("in a worker")

    monkeypatch.setattr(encoding.Encoding, "encode", fail)
    with pytest.raises(ZeroDivisionError, match="in a worker") as caught:
        prepare(cfg)
    said = "".join(traceback.format_exception(caught.value))
    assert said.count("Traceback") == 1
    assert said.count("in fail") == 1


def test_interrupted_or_killed_preparation_leaves_no_process(cfg):
    """Ctrl-C or SIGKILL of the parent ends workers that would wait endlessly."""
    script = """
import os, sys, time
from diffllm.data.config import DataConfig
from diffllm.data.preparation import encoding
from diffllm.data.preparation.prepare import prepare
def hang(*args):
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.01)
encoding.Encoding.encode = hang
prepare(DataConfig(source="files", paths=sys.argv[2:], cache_dir=sys.argv[1], vocab_size=300))
"""
    for sent in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(
            [sys.executable, "-c", script, cfg.cache_dir, *cfg.paths[:1]],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8",
        )  # fmt: skip
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.send_signal(sent)
        process.wait()
        wait_until(lambda: has_ended(worker), "end of the worker")  # noqa: B023


def test_heldout_fraction_close_to_1_leaves_one_training_document(cfg):
    data = prepare(replace(cfg, heldout_fraction=1 - 1e-9))
    stream = data.split("train")
    tokens = stream.tokens(0, len(stream)).tolist()
    assert data.tokenizer().decode(tokens) == max(TEXTS, key=hash_of)
    assert sum(s.documents for s in data.manifest.splits.values()) == len(TEXTS)


class Endless:
    """A part of many documents, generated while reading."""

    name, size = "endless", 0

    def __init__(self, documents: int) -> None:
        self.documents = documents

    def read(self) -> Iterator[TextBatch]:
        for start in range(0, self.documents, 1000):
            yield TextBatch([f"{start} {i}" for i in range(1000)])


@pytest.mark.slow
def test_preparation_memory_is_independent_of_document_count(cfg, tmp_path, monkeypatch):
    encode, peaks = encoding.Encoding.encode, {}
    base = open_corpus(cfg, Path(cfg.cache_dir))

    def measured(self: encoding.Encoding, *args: Any) -> None:
        encode(self, *args)
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        (tmp_path / "peak").write_text(status.split("VmHWM:")[1].split()[0], encoding="utf-8")

    monkeypatch.setattr(encoding.Encoding, "encode", measured)
    monkeypatch.setattr(encoding, "BATCH_BYTES", 100_000)
    for documents in (20_000, 200_000):
        parts: list[Part] = [Endless(documents)]
        job = TokensJob(
            replace(base, list_parts=lambda parts=parts: parts),
            Path(str(cfg.tokenizer)) / "tokenizer.model",
            0.02,
            tmp_path / f"of-{documents}",
        )
        job.build(PrepareConfig())
        peaks[documents] = int((tmp_path / "peak").read_text(encoding="utf-8"))
    assert peaks[200_000] < peaks[20_000] + 4_000, peaks  # KiB


def test_preparation_progress_line_contains_current_file_name(cfg, monkeypatch, capfd):
    """The stalled part continues only after a progress line has named the part."""
    cache = Path(cfg.cache_dir)
    base, told = open_corpus(cfg, cache), cache / "told"

    class Stalled(Endless):
        name = "a hub that hangs"

        def read(self) -> Iterator[TextBatch]:
            while not told.exists():
                time.sleep(0.001)
            yield from super().read()

    def read_aloud(text: str) -> None:
        to_stderr(text)
        if "MB/s" in text and "tokens/s; reading a hub that hangs" in text:
            told.touch()

    monkeypatch.setattr(workers, "REPORT_SECONDS", 0.02)
    monkeypatch.setattr(workers, "to_stderr", read_aloud)
    job = TokensJob(
        replace(base, list_parts=lambda: [Stalled(1000)]),
        Path(str(cfg.tokenizer)) / "tokenizer.model",
        0.02,
        cache / "tokens",
    )
    job.build(PrepareConfig())
    assert "MB, 0.0M tokens; 0.0 MB/s, 0 tokens/s; reading a hub that" in capfd.readouterr().err
