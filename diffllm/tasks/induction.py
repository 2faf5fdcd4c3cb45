"""Induction (Olsson et al., arXiv 2209.11895): a word that has been seen comes again, and with it
should come the word that followed it."""

import random

from diffllm.tasks.task import Count, Example, Level, Task, shuffled_candidates, task
from diffllm.tasks.words import words

CANDIDATES = 8


@task("induction", words=(8, 16, 32, 64, 128, 256, 512))
class Induction(Task):
    """A line of different words, and one of them again; the answers are words of the line."""

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        line = words(rng, int(level["words"]))
        places = apart(rng, len(line), min(CANDIDATES, len(line) // 2))
        asked = rng.choice(places)
        others = [f" {line[place]}" for place in places if place != asked]
        candidates, answer = shuffled_candidates(rng, f" {line[asked]}", others)
        prompt = " ".join([*line, line[asked - 1]])
        return Example(prompt, candidates, answer, {"distance": len(line) - asked})


def apart(rng: random.Random, length: int, number: int) -> list[int]:
    """Draw places behind the first, no two of them side by side: the word before each is then no
    candidate, and the one that comes again is no more likely than others to be the first or last.
    """
    return [
        place + i
        for i, place in enumerate(sorted(rng.sample(range(1, length - number + 1), number)))
    ]
