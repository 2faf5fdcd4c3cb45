"""Datasets of the hub, streamed from a local server; messages name files that hang."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fake_hub import NAME, SHA
from runs.json_files import write_jsonl
from sample_texts import sample_documents

from diffllm.core.errors import DataError
from diffllm.data.config import DataConfig
from diffllm.data.preparation.prepare import prepare
from diffllm.data.prepared import TokenData
from diffllm.data.text import hub

TEXTS = sample_documents(300)
PREPARE = """
import sys
from diffllm.data.config import DataConfig
from diffllm.data.preparation import workers
from diffllm.data.preparation.prepare import prepare
workers.REPORT_SECONDS = 0.5
cache, dataset, revision = sys.argv[1:]
print(prepare(DataConfig(
    source="hub", dataset=dataset, revision=revision or None, cache_dir=cache, vocab_size=400,
    text_column="content",
)).directory)
"""


def hub_environment(address: str, directory: Path) -> dict[str, str]:
    """Return the environment of a process that uses this address as the hub."""
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
    """Start a hub, which hangs at paths with `hangs_at`; return the environment of readers."""
    servers: list[subprocess.Popen[str]] = []

    def start(hangs_at: str = "no file") -> dict[str, str]:
        script = Path(__file__).with_name("fake_hub.py")
        words = [sys.executable, str(script), str(repository), hangs_at]
        servers.append(subprocess.Popen(words, stdout=subprocess.PIPE, encoding="utf-8"))
        assert servers[-1].stdout is not None
        address = f"http://127.0.0.1:{int(servers[-1].stdout.readline())}"
        return hub_environment(address, tmp_path)

    yield start
    for server in servers:
        server.kill()
        server.communicate()


def test_hub_dataset_files_are_streamed_without_local_copies(tmp_path, serve, make_config):
    words = [sys.executable, "-c", PREPARE, str(tmp_path / "cache"), NAME, ""]
    result = subprocess.run(words, env=serve(), capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert f"{NAME}@{SHA[:12]}, train" in result.stderr
    data = TokenData(Path(result.stdout.strip()))
    assert len(data.manifest.splits["train"].shards) == 3  # one shard per file
    corpus = write_jsonl(tmp_path / "local.jsonl", [{"text": text} for text in TEXTS])
    local = make_config(corpus, tokenizer=str(data.directory))
    for split in ("train", "heldout"):
        here, there = prepare(local).split(split), data.split(split)
        assert (here.tokens(0, len(here)) == there.tokens(0, len(there))).all()
    kept = [p for p in (tmp_path / "home").rglob("*") if p.suffix in (".parquet", ".arrow")]
    kept += [p for p in (tmp_path / "cache").rglob("*") if p.suffix in (".parquet", ".arrow")]
    assert not kept  # no copy of the corpus


@pytest.mark.parametrize(
    ("variables", "own"),
    [({}, True), ({"HF_HOME": "/home"}, False), ({"HF_DATASETS_CACHE": "/cache"}, False)],
)
def test_hugging_face_variables_choose_cache_of_hub_datasets(tmp_path, monkeypatch, variables, own):
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    caches: list[str | None] = []

    def load_dataset(*_: Any, cache_dir: str | None, **__: Any) -> None:
        caches.append(cache_dir)
        raise OSError("no network")

    monkeypatch.setattr(hub, "library", lambda: SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError):
        hub.files_of(DataConfig(source="hub", dataset=NAME), SHA, tmp_path)
    assert caches == [str(tmp_path) if own else None]


def waits(words: list[str], env: dict[str, str], message: str) -> None:
    """Assert that a process writes `message` to stderr, then kill the process."""
    process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, encoding="utf-8")
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


@pytest.mark.slow
def test_preparation_prints_hub_file_number_while_download_hangs(tmp_path, serve, prepared):
    script = PREPARE.replace("=400", f"=400, tokenizer={str(prepared.directory)!r}")
    words = [sys.executable, "-c", script, str(tmp_path / "cache"), NAME, ""]
    waits(words, serve("train-00002"), f"reading data.dataset={NAME}, file 3 of 3")


def test_preparation_prints_dataset_name_while_waiting_for_the_hub(tmp_path):
    with socket.socket() as hangs:
        hangs.bind(("127.0.0.1", 0))
        hangs.listen(50)
        address = f"http://127.0.0.1:{hangs.getsockname()[1]}"
        env = hub_environment(address, tmp_path)
        for revision, what in (("", "commit"), (SHA, "list of files")):
            words = [sys.executable, "-c", PREPARE, str(tmp_path / "cache"), NAME, revision]
            waits(words, env, f"waiting for the hub's {what} of {NAME}")


def test_unknown_hub_dataset_split_raises_error_with_available_splits(tmp_path, serve):
    script = PREPARE.replace(")).directory", "split='dev')).directory")
    words = [sys.executable, "-c", script, str(tmp_path / "cache"), NAME, SHA]
    result = subprocess.run(words, env=serve(), capture_output=True, encoding="utf-8")
    said = f"DataError: data.dataset={NAME} cannot be read: Bad split: dev. Available splits"
    assert said in result.stderr
