"""Words that mean nothing: two syllables of a consonant and a vowel each, as "bako".

They are of one length, so that no answer stands out by its size, and no tokenizer knows them as
something else.
"""

from collections.abc import Sequence
from random import Random

from diffllm.tasks.task import Level

CONSONANTS, VOWELS = "bdfghjklmnprstvwyz", "aeiou"
SYLLABLES = tuple(consonant + vowel for consonant in CONSONANTS for vowel in VOWELS)


def word(number: int) -> str:
    return SYLLABLES[number // len(SYLLABLES)] + SYLLABLES[number % len(SYLLABLES)]


def words(rng: Random, count: int, pool: Sequence[int] | None = None) -> list[str]:
    """Draw so many different words.

    Args:
        pool: numbers of the words to draw from; all of them by default.

    Raises ValueError for more than there are.
    """
    every = range(len(SYLLABLES) ** 2)
    numbers = every if pool is None else pool
    if len(numbers) > len(every):
        raise ValueError(f"there are {len(every):,} words, not {len(numbers):,}")
    if len(numbers) < count:
        raise ValueError(f"{count:,} different words are wanted of {len(numbers):,}")
    return [word(number) for number in rng.sample(numbers, count)]


def pool(level: Level) -> range | None:
    """Return the numbers of the words that a level draws from; None for all."""
    return range(int(level["words"])) if "words" in level else None
