"""Texts for small corpora."""

import random


def sample_documents(count: int, seed: int = 0) -> list[str]:
    """Distinct one-line texts with enough repetition for a vocabulary of 400 pieces."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(300)]
    return [f"{i} " + " ".join(rng.choices(words, k=rng.randint(20, 60))) for i in range(count)]
