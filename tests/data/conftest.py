"""Small real corpora and token streams."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_texts import sample_documents

from diffllm.data import shards
from diffllm.data.config import DataConfig, SampleBy
from diffllm.data.loader import TrainLoader
from diffllm.data.preparation.prepare import prepare
from diffllm.data.prepared import TokenData
from diffllm.data.shards import Manifest, ShardWriter, Split
from diffllm.data.streams import TokenStream


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(sample_documents(200)) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., DataConfig]:
    def make(*paths: Path, **changes: Any) -> DataConfig:
        defaults: dict[str, Any] = {
            "source": "files",
            "paths": [str(path) for path in paths],
            "cache_dir": str(tmp_path / "cache"),
            "vocab_size": 400,
        }
        if changes.get("source", "files") == "files":
            defaults["sample_by"] = SampleBy.line
        return DataConfig(**{**defaults, **changes})

    return make


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    """Token shards of 200 one-line documents."""
    directory = tmp_path_factory.mktemp("prepared")
    corpus = directory / "corpus.txt"
    corpus.write_text("\n".join(sample_documents(200)) + "\n", encoding="utf-8")
    return prepare(
        DataConfig(
            source="files",
            paths=[str(corpus)],
            cache_dir=str(directory / "cache"),
            vocab_size=400,
            sample_by=SampleBy.line,
            heldout_fraction=0.1,
        )
    )


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 600 pieces, as in the repository of a model."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("fast")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<pad>", "<|endoftext|>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator([inspect.getsource(inspect)], trainer)
    bpe.enable_truncation(5)
    bpe.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def make_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TokenStream]:
    """Write tokens in shards of `shard_tokens` and open a stream of these shards."""

    def make(
        tokens: list[int],
        vocab_size: int = 50_000,
        shard_tokens: int = 97,
        directory: str | Path = "stream",
    ) -> TokenStream:
        monkeypatch.setattr(shards, "SHARD_TOKENS", shard_tokens)
        directory = tmp_path / directory
        directory.mkdir()
        writer = ShardWriter(directory, "train", vocab_size)
        writer.add(np.array(tokens, dtype=np.int64), text_bytes=len(tokens), documents=1)
        manifest = Manifest(
            format_version=1,
            source="test",
            corpus="",
            pieces_hash="",
            vocab_size=vocab_size,
            eos_id=0,
            dtype=np.dtype(shards.token_dtype(vocab_size)).name,
            skipped_empty=0,
            skipped_undecodable=0,
            heldout_unigram_entropy=0.0,
            splits={"train": writer.finish(), "heldout": Split(0, 0, 0, [])},
        )
        manifest.save(directory)
        return TokenStream(directory, Manifest.load(directory), "train")

    return make


@pytest.fixture
def open_loader() -> Iterator[Callable[..., TrainLoader]]:
    """Open loaders with global batches of 12 samples; close all loaders after the test."""
    loaders: list[TrainLoader] = []

    def make(samples: Any, **options: Any) -> TrainLoader:
        options = {"micro_batch_size": 4, "num_workers": 0, **options}
        loaders.append(TrainLoader(samples, **{"global_batch_size": 12, **options}))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()
