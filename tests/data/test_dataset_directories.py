"""Directories of files as datasets: what is not read is said, what is damaged is refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from diffllm.core.errors import DataError
from diffllm.data import prepare
from diffllm.data.config import DataConfig
from diffllm.data.text.corpus import open_corpus

MakeConfig = Callable[..., DataConfig]
LINES = b"".join(b'{"text": "line %d"}\n' % i for i in range(40))


def read(cfg: DataConfig) -> list[str | None]:
    parts = open_corpus(cfg, Path(cfg.cache_dir)).parts
    return [text for part in parts for some in part.read() for text in some.texts]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "dataset"
    path.mkdir()
    (path / "a.jsonl").write_bytes(LINES)
    return path


def test_files_that_are_not_read_are_said(
    directory: Path, make_config: MakeConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["p"]}), directory / "b.parquet")
    (directory / "c.txt").write_text("text")
    (directory / "notes.md").write_text("no text of a dataset")
    assert read(make_config(source="hub", dataset=str(directory))) == ["p"]
    said = [line for line in capfd.readouterr().err.splitlines() if "not read" in line]
    assert said == [
        f"data.dataset={directory}: these files are not read: a.jsonl, c.txt; data.paths reads them"
    ]


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def cut_off(path: Path) -> None:
    packed = zstandard.compress(LINES)
    path.with_name("b.jsonl.zst").write_bytes(packed[: len(packed) // 2])


def bad_line(path: Path) -> None:
    path.write_bytes(LINES + b'{"text": \n')


@pytest.mark.parametrize("damage", [dangling, os.mkfifo, cut_off, bad_line])
def test_a_damaged_file_is_named(
    directory: Path, make_config: MakeConfig, damage: Callable[[Path], Any]
) -> None:
    damage(directory / "b.jsonl")
    with pytest.raises(DataError, match=str(directory / "b.jsonl")):
        read(make_config(source="hub", dataset=str(directory)))


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "~/nowhere", "a/b/c"])
def test_a_directory_that_is_not_there(make_config: MakeConfig, name: str) -> None:
    with pytest.raises(DataError, match=f"data.dataset={name}: no such directory, and no name of"):
        read(make_config(source="hub", dataset=name))


def rewrite(path: Path) -> None:
    """Neither its size nor its time shows it."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"line", b"LINE"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("split", ["train", "train[:30]"])
def test_a_file_of_the_same_size_and_time_gives_its_new_text(
    directory: Path, make_config: MakeConfig, split: str
) -> None:
    cfg = make_config(source="hub", dataset=str(directory), split=split)
    before = read(cfg)
    rewrite(directory / "a.jsonl")
    assert read(cfg) == [str(text).replace("line", "LINE") for text in before]


def test_a_file_that_is_written_over_while_it_is_read(
    directory: Path, make_config: MakeConfig
) -> None:
    cfg = make_config(source="hub", dataset=str(directory))
    (part,) = open_corpus(cfg, Path(cfg.cache_dir)).parts
    some = part.read()
    next(some)
    rewrite(directory / "a.jsonl")
    with pytest.raises(DataError, match=r"a.jsonl: changed since it was hashed; start again"):
        list(some)
    assert prepare(make_config(source="hub", dataset=str(directory), vocab_size=265))
