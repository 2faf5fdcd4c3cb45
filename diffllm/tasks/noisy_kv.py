"""Retrieval of a value by its key among distractors, which grow in number and in similarity.

A key is of six syllables. A distractor's key has `shared` of them from the asked key, at the same
places: of similarity 5/6 it differs in one. Cancelling noise between maps, which differential
attention claims, should matter most where keys look alike.
"""

import random
from math import comb

from diffllm.tasks.task import Count, Example, Level, Task, shuffled_candidates, task
from diffllm.tasks.words import SYLLABLES, words

SYLLABLES_OF_KEY = 6


@task("noisy_kv", distractors=(3, 7, 15, 31, 63, 127), shared=(0, 3, 5))
class NoisyKv(Task):
    """Lines of a key and its value, and the asked key again."""

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        number, shared = int(level["distractors"]), int(level["shared"])
        asked = rng.choices(SYLLABLES, k=SYLLABLES_OF_KEY)
        different = comb(SYLLABLES_OF_KEY, shared) * (len(SYLLABLES) - 1) ** (
            SYLLABLES_OF_KEY - shared
        )
        most = min(different, len(SYLLABLES) ** 2) - 1  # keys and values all differ
        if number > most:
            raise ValueError(f"{number:,} distractors at shared={shared}: at most {most:,}")
        distinct = {"".join(asked): None}
        while len(distinct) <= number:
            distinct["".join(distractor(rng, asked, shared))] = None
        keys = list(distinct)
        values = words(rng, len(keys))
        lines = [f"{key} = {value}" for key, value in zip(keys, values, strict=True)]
        rng.shuffle(lines)
        place = lines.index(f"{keys[0]} = {values[0]}")
        others = [f" {value}" for value in values[1:]]
        candidates, answer = shuffled_candidates(rng, f" {values[0]}", others)
        prompt = "\n".join([*lines, f"{keys[0]} ="])
        return Example(prompt, candidates, answer, {"place": place / max(1, number)})


def distractor(rng: random.Random, asked: list[str], shared: int) -> list[str]:
    """Draw a key that has exactly so many syllables of the asked one at their places."""
    kept = set(rng.sample(range(len(asked)), shared))
    return [
        own if i in kept else rng.choice([other for other in SYLLABLES if other != own])
        for i, own in enumerate(asked)
    ]
