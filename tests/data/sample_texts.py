"""Texts for small corpora, and contents of prepared data."""

import random

import numpy as np

from diffllm.data.mixture import Prepared
from diffllm.data.token_data import TokenData


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
