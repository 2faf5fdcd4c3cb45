"""Datasets of the hub, streamed from a server on this machine, and directories as datasets.

Files that are not read are named, damaged files are refused.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from fake_hub import NAME, SHA
from sample_texts import sample_documents

from diffllm.core.errors import DataError
from diffllm.data import TokenData, prepare
from diffllm.data.config import DataConfig
from diffllm.data.text.corpus import open_corpus

MakeConfig = Callable[..., DataConfig]
TEXTS = sample_documents(300)
LINES = b"".join(b'{"text": "line %d"}\n' % i for i in range(40))
PREPARE = """
import sys
from diffllm.data.config import DataConfig
from diffllm.data.preparation import workers
from diffllm.data.preparation.prepare import prepare
workers.EVERY = 0.5
cache, dataset, revision = sys.argv[1:]
print(prepare(DataConfig(
    source="hub", dataset=dataset, revision=revision or None, cache_dir=cache, vocab_size=400,
    text_column="content",
)).directory)
"""


def environment(address: str, directory: Path) -> dict[str, str]:
    """Let a process take what is at this address for the hub."""
    online = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    return {**os.environ, **online, "HF_ENDPOINT": address, "HF_HOME": str(directory / "home")}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "repository" / "data").mkdir(parents=True)
    for i in range(3):
        table = pyarrow.table({"content": TEXTS[100 * i : 100 * i + 100], "id": list(range(100))})
        name = f"train-{i:05d}-of-00003.parquet"
        pyarrow.parquet.write_table(table, tmp_path / "repository" / "data" / name)
    return tmp_path / "repository"


@pytest.fixture
def serve(tmp_path: Path, repository: Path) -> Iterator[Callable[..., dict[str, str]]]:
    """Starts the hub; returns the environment of processes that read from it."""
    servers: list[subprocess.Popen[str]] = []

    def start() -> dict[str, str]:
        script = Path(__file__).with_name("fake_hub.py")
        words = [sys.executable, str(script), str(repository)]
        servers.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert servers[-1].stdout is not None
        address = f"http://127.0.0.1:{int(servers[-1].stdout.readline())}"
        return environment(address, tmp_path)

    yield start
    for server in servers:
        server.kill()
        server.communicate()


def test_the_files_of_a_commit_are_streamed(
    tmp_path: Path, serve: Callable[..., dict[str, str]], make_config: MakeConfig
) -> None:
    words = [sys.executable, "-c", PREPARE, str(tmp_path / "cache"), NAME, ""]
    result = subprocess.run(words, env=serve(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"{NAME}@{SHA[:12]}, train" in result.stderr
    data = TokenData(Path(result.stdout.strip()))
    assert len(data.manifest.splits["train"].shards) == 3  # a file each
    (tmp_path / "local.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    local = make_config(tmp_path / "local.jsonl", tokenizer=str(data.directory))
    for split in ("train", "heldout"):
        here, there = prepare(local).split(split), data.split(split)
        assert (here.tokens(0, len(here)) == there.tokens(0, len(there))).all()
    kept = [p for p in (tmp_path / "home").rglob("*") if p.suffix in (".parquet", ".arrow")]
    kept += [p for p in (tmp_path / "cache").rglob("*") if p.suffix in (".parquet", ".arrow")]
    assert not kept  # no copy of the corpus


def waits(words: list[str], env: dict[str, str], message: str) -> None:
    """Assert that a process says what it waits for; stop it then."""
    process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if message in line:
            break
    else:
        pytest.fail("".join(said))
    process.kill()
    process.communicate()


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.socket() as hangs:
        hangs.bind(("127.0.0.1", 0))
        hangs.listen(50)
        address = f"http://127.0.0.1:{hangs.getsockname()[1]}"
        env = environment(address, tmp_path)
        for revision, what in (("", "commit"), (SHA, "list of files")):
            words = [sys.executable, "-c", PREPARE, str(tmp_path / "cache"), NAME, revision]
            waits(words, env, f"waiting for the hub's {what} of {NAME}")


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
