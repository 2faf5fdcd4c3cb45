"""Texts for small corpora, and contents of prepared data."""

import json
import random
from pathlib import Path

import numpy as np

from diffllm.data.config import DataConfig
from diffllm.data.prepared import Prepared, TokenData
from diffllm.data.text.corpus import Corpus, open_corpus


def sample_documents(count: int, seed: int = 0) -> list[str]:
    """Return distinct one-line texts with enough repetition for a vocabulary of 400 pieces."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(300)]
    return [f"{i} " + " ".join(rng.choices(words, k=rng.randint(20, 60))) for i in range(count)]


def contents(data: TokenData) -> dict[str, bytes]:
    """Read all files but marks and models, whose bytes contain the name of a temporary file."""
    files = data.directory.glob("[!.]*")
    return {path.name: path.read_bytes() for path in files if path.suffix != ".model"}


def documents_of(data: Prepared, split: str) -> list[str]:
    tokenizer, stream = data.tokenizer(), data.split(split)
    tokens = stream.tokens(0, len(stream))
    parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id) + 1)[:-1]
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


def opened(cfg: DataConfig) -> Corpus:
    return open_corpus(cfg, Path(cfg.cache_dir))


def texts(cfg: DataConfig) -> list[str | None]:
    parts = opened(cfg).parts
    return [text for part in parts for documents in part.read() for text in documents.texts]


def json_lines(*documents: str | None, column: str = "text") -> str:
    return "".join(json.dumps({column: text, "id": i}) + "\n" for i, text in enumerate(documents))
