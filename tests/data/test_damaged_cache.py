"""A damaged cache of tokens is prepared again, or refused with an error that names the file."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs.json_files import read_json, write_json
from sample_texts import sample_documents

from diffllm.core.errors import DataError
from diffllm.data.config import DataConfig, Packing, SampleBy
from diffllm.data.preparation.prepare import prepare
from diffllm.data.preparation.tokens import TokensJob
from diffllm.data.sequences import PackedSequences, training_sequences


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A corpus with a cache that contains every kind of file."""
    directory = tmp_path_factory.mktemp("kept")
    (directory / "t.txt").write_text("\n".join(sample_documents(60)) + "\n", encoding="utf-8")
    cfg = DataConfig(
        **{"source": "files", "paths": [str(directory / "t.txt")], "sample_by": SampleBy.line},
        **{"vocab_size": 300, "heldout_fraction": 0.3},
        packing=Packing.best_fit,
        cache_dir=str(directory / "cache"),
    )
    read(cfg)
    return cfg


def read(cfg: DataConfig) -> list[list[int]]:
    """Read the first sequence and a held-out token, and load the tokenizer."""
    data = prepare(cfg)
    data.tokenizer()
    sequences = training_sequences(data, cfg, 32)  # type: ignore[arg-type]
    assert isinstance(sequences, PackedSequences)
    return [sequences.plan[0], data.split("heldout").tokens(0, 1).tolist()]  # type: ignore[list-item]


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def terabyte(path: Path) -> None:
    os.truncate(path, 2**40)


def holds(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


RECORDS = ("file_index.json", "tokens/*/manifest.json", "packing/*/plan.json")
OTHERS = (
    "tok*/*/tokenizer.model",
    "tokens/*/train-*.bin",
    "packing/*/starts.bin",
    "*/*/.*.verified",
)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        *((pattern, fifo) for pattern in (*RECORDS, *OTHERS)),
        *((pattern, terabyte) for pattern in (*RECORDS, OTHERS[0])),
        *((pattern, holds(b"[" * 200_000)) for pattern in RECORDS),
        *((pattern, holds(b"[]")) for pattern in RECORDS),
    ],
)
def test_damaged_cache_file_is_replaced_or_raises_error_with_path(
    kept: DataConfig, tmp_path: Path, pattern: str, damage: Callable[[Path], None]
) -> None:
    whole = read(kept)
    cache = shutil.copytree(kept.cache_dir, tmp_path / "cache")
    for path in cache.glob(pattern):
        damage(path)
    if pattern == OTHERS[0]:  # the tokenizer is read only to prepare tokens
        shutil.rmtree(cache / "tokens")
    said: list[DataError] = []
    try:
        found = read(DataConfig(**{**vars(kept), "cache_dir": str(cache)}))
    except DataError as error:
        said = [error]
        found = whole
    assert found == whole
    assert all(f"{cache}/" in str(error) for error in said)


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize("damage", [fifo, terabyte, flip, holds(b""), Path.unlink])
def test_damaged_partial_shard_is_rewritten_or_raises_error_with_path(
    kept: DataConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    whole = read(kept)
    cfg = DataConfig(**{**vars(kept), "cache_dir": str(tmp_path / "cache")})
    with monkeypatch.context() as patch:
        patch.setattr(TokensJob, "join", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(cfg)
    (file,) = tmp_path.glob("cache/tokens/*.partial-*/tokens/heldout-00000-00000.bin")
    damage(file)
    if damage in (fifo, flip):
        with pytest.raises(DataError, match=rf"{file}: (Link or not a regular|damaged: )"):
            prepare(cfg)
        shutil.rmtree(file.parent)
    assert read(cfg) == whole


def edited(file: Path, keys: list[Any], value: Any) -> None:
    content = inner = read_json(file)
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    write_json(file, content)


@pytest.mark.parametrize(
    ("name", "keys", "value", "message"),
    [
        ("manifest", ["vocab_size"], "x", "vocab_size='x' must be a whole number"),
        ("manifest", ["eos_id"], 300, "eos_id=300 must be below vocab_size=300"),
        ("manifest", ["dtype"], "object", "dtype=object must be uint16 for 300 pieces"),
        ("manifest", ["splits"], {}, "splits.train is missing"),
        ("manifest", ["splits", "train", "documents"], -1, "train: counts must be at least 0"),
        ("manifest", ["splits", "train", "tokens"], 9, "the tokens of shards must add up to 9"),
        ("manifest", ["splits", "train", "shards", 0, "file"], "../t", "must be a file name"),
        ("manifest", ["splits", "train", "shards", 0, "file"], "a\0", "must be a file name"),
        ("manifest", ["splits", "train", "shards", 0, "mask"], "../m", "must be a file name"),
        ("manifest", ["splits", "train", "shards", 0, "mask"], "m", "must have both mask and"),
        ("manifest", ["format_version"], 99, "format 99, expected 1"),
        ("manifest", ["heldout_unigram_entropy"], 1e999, "must be a finite number"),
        ("plan", ["counts", "sequences"], 3, "file sizes do not match"),
        ("plan", ["counts", "padding"], -1, "counts must be at least 0"),
        ("plan", ["files"], {}, "files must be starts.bin, lengths.bin"),
        ("plan", ["files", "starts.bin", "bytes"], 10**30, "beyond 64 bits"),
    ],
)
def test_invalid_value_in_cached_json_file_raises_error_with_path(
    kept: DataConfig, tmp_path: Path, name: str, keys: list[Any], value: Any, message: str
) -> None:
    cache = shutil.copytree(kept.cache_dir, tmp_path / "cache")
    (file,) = cache.glob(f"*/*/{name}.json")
    edited(file, keys, value)
    with pytest.raises(DataError, match=rf"{name}.json: unusable .*{message}.*; delete "):
        read(DataConfig(**{**vars(kept), "cache_dir": str(cache)}))


@pytest.mark.parametrize("facts", [7, [1, "", "", True, None], [1, "", "", True]])
def test_invalid_cached_hash_of_a_corpus_file_is_ignored(
    kept: DataConfig, tmp_path: Path, facts: object
) -> None:
    cache = shutil.copytree(kept.cache_dir, tmp_path / "cache")
    edited(cache / "file_index.json", ["files", kept.paths[0]], facts)
    assert read(DataConfig(**{**vars(kept), "cache_dir": str(cache)})) == read(kept)
