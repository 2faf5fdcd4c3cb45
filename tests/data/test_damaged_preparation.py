"""Preparation with damaged or changing corpora, full disks, and SIGKILL at any moment."""

import dataclasses
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from disks import small_disk
from sample_texts import contents, sample_documents
from tiers import slow_but

from diffllm.core.errors import DataError
from diffllm.data.config import DataConfig, SampleBy
from diffllm.data.preparation.prepare import prepare
from diffllm.data.text import files
from diffllm.data.text.file_index import FileFacts

TEXTS = sample_documents(3000)

PREPARE = """
import os, signal, sys
from diffllm.data.preparation import prepare as preparation
from diffllm.data.config import DataConfig, SampleBy
moment, cache, *paths = sys.argv[1:]
seen, own = 0, os.getpid()
def count(event, arguments):
    global seen
    if event in ("open", "os.mkdir", "os.rename", "os.remove") and os.getpid() == own:
        seen += str(arguments[0]).startswith(cache)
        if seen and seen == int(moment):
            os.kill(own, signal.SIGKILL)
sys.addaudithook(count)
preparation.prepare(DataConfig(source="files", paths=paths, cache_dir=cache, vocab_size=400,
                               sample_by=SampleBy.line))
print(seen)
"""
"""Program that prepares a corpus and kills itself at file operation number `moment` in the cache.

With moment 0 the program finishes and prints the number of file operations."""


def visible(cache: Path) -> list[str]:
    """List the directories that a later run would use as complete."""
    return sorted(
        str(path.relative_to(cache))
        for kind in ("tokens", "tokenizers")
        for path in (cache / kind).glob("*")
        if path.is_dir() and path.name[0] != "." and ".partial-" not in path.name
    )


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_parquet(path: Path, texts: list[str]) -> None:
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=200, compression="zstd")


def make_three(directory: Path, suffix: str) -> list[Path]:
    """Write three intact files of one format."""
    paths = [directory / f"{i}{suffix}" for i in range(3)]
    for i, path in enumerate(paths):
        part = TEXTS[i::3]
        if suffix == ".parquet":
            write_parquet(path, part)
        elif suffix.endswith(".gz"):
            path.write_bytes(gzip.compress(jsonl(part)))
        else:
            path.write_bytes(jsonl(part))
    return paths


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scramble(path: Path) -> None:
    """Damage the middle of a file, so that header and footer stay intact."""
    content = bytearray(path.read_bytes())
    third = len(content) // 3
    content[third : 2 * third] = random.Random(0).randbytes(third)
    path.write_bytes(content)


def break_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[len(lines) // 2] = b'{"text": "no end\n'
    path.write_bytes(b"".join(lines))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("suffix", "damage"), [(".jsonl.gz", cut), (".parquet", scramble), (".jsonl", break_line)]
)
def test_preparation_caches_nothing_if_a_file_is_damaged(tmp_path, make_config, suffix, damage):
    paths = make_three(tmp_path, suffix)
    good = paths[1].read_bytes()
    damage(paths[1])
    cfg = make_config(*paths)
    with pytest.raises(DataError) as caught:
        prepare(cfg)
    assert str(paths[1]) in str(caught.value)
    assert not any(str(path) in str(caught.value) for path in (paths[0], paths[2]))
    assert str(caught.value).isprintable()
    assert visible(Path(cfg.cache_dir)) == []
    paths[1].write_bytes(good)
    other = prepare(make_config(*paths, cache_dir=str(tmp_path / "other")))
    assert contents(prepare(cfg)) == contents(other)


def vanish(path: Path) -> None:
    path.unlink(missing_ok=True)


def grow(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write('{"text": "one more"}\n')


def replace(path: Path) -> None:
    content = path.read_bytes().replace(b"e", b"a")
    path.unlink()
    path.write_bytes(content)


def rewrite(path: Path) -> None:
    """Change the content without a change of size or modification time."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"e", b"a"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", slow_but([rewrite], [vanish, grow, replace, rewrite]))
@pytest.mark.parametrize("call", [0, 1])
def test_file_that_changes_after_hash_is_refused(tmp_path, make_config, monkeypatch, change, call):
    """The file changes before reading (call 0) or during reading (call 1)."""
    paths = make_three(tmp_path, ".jsonl")
    original, check, calls = paths[1].read_bytes(), files.check_unchanged, iter(range(9))

    def changing(path: Path, facts: FileFacts) -> None:
        if path == paths[1] and next(calls) == call:
            change(path)
        check(path, facts)

    cfg = make_config(*paths, tokenizer=tokenizer_of(make_config(*paths)))
    with monkeypatch.context() as patch:
        patch.setattr(files, "check_unchanged", changing)
        with pytest.raises(DataError, match=str(paths[1])):
            prepare(cfg)
    assert visible(Path(cfg.cache_dir)) == []
    paths[1].write_bytes(original)
    assert prepare(cfg).manifest.splits["train"].documents > 2000


def tokenizer_of(cfg: DataConfig) -> str:
    other = dataclasses.replace(cfg, cache_dir=f"{cfg.cache_dir}-of-tokenizer")
    return str(prepare(other).directory)


@pytest.mark.slow
def test_randomly_killed_preparation_leaves_no_incomplete_directory(tmp_path, make_config, rng):
    """Incomplete directories are never used; the next start writes the bytes of a normal run."""
    paths = make_three(tmp_path, ".jsonl")
    cfg = make_config(*paths)

    def prepare_until(moment: int, cache: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PREPARE, str(moment), cache, *map(str, paths)]
        return subprocess.run(command, capture_output=True, encoding="utf-8")

    undisturbed = prepare(make_config(*paths, cache_dir=str(tmp_path / "undisturbed")))
    moments, killed = int(prepare_until(0, str(tmp_path / "counted")).stdout), 0
    while killed < 5:
        done = prepare_until(rng.randint(1, moments), cfg.cache_dir)
        if done.returncode == 0:  # earlier starts left less work: start again
            shutil.rmtree(cfg.cache_dir)
            continue
        assert done.returncode == -signal.SIGKILL, done.stderr
        killed += 1
        for name in visible(Path(cfg.cache_dir)):
            directory, expected = Path(cfg.cache_dir) / name, tmp_path / "undisturbed" / name
            names = {path.name for path in expected.glob("[!.]*")}
            assert {path.name for path in directory.glob("[!.]*")} == names
    assert contents(prepare(cfg)) == contents(undisturbed)
    assert not list(Path(cfg.cache_dir).glob("tokens/*.partial-*/tokens"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    with small_disk(tmp_path / "disk", "4000k") as disk:
        yield disk


@pytest.mark.parametrize("size", slow_but([4, 80], [4, 80, 300, 500]))
def test_preparation_on_full_disk_does_not_change_older_corpora(tmp_path, make_config, disk, size):
    first = tmp_path / "first.txt"
    first.write_text("\n".join(TEXTS[:200]), encoding="utf-8")
    older = prepare(make_config(first, cache_dir=str(disk / "cache"), sample_by=SampleBy.line))
    before, seen = contents(older), visible(disk / "cache")
    used = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(b"x" * max(0, used.f_bavail * used.f_frsize - size * 1024))
    paths = make_three(tmp_path, ".jsonl")
    cfg = make_config(*paths, cache_dir=str(disk / "cache"))
    with pytest.raises(DataError) as caught:
        prepare(cfg)
    assert "No space left" in str(caught.value)
    assert str(disk / "cache") in str(caught.value)
    assert contents(older) == before
    left = set(visible(disk / "cache")) - set(seen)
    assert not [name for name in left if name.startswith("tokens/")]
    filler.unlink()
    assert prepare(cfg).manifest.splits["train"].documents > 2000
