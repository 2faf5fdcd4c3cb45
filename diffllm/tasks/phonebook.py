"""A phone book (Jelassi et al., arXiv 2402.01032): names with numbers, and one of the names."""

import random

from diffllm.tasks.task import Count, Example, Level, Task, shuffled_candidates, task
from diffllm.tasks.words import words

DIGITS = 4


@task("phonebook", entries=(3, 6, 12, 24, 48, 96, 192))
class Phonebook(Task):
    """Answers are the numbers of the book, digit by digit."""

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        entries = int(level["entries"])
        names = [name.capitalize() for name in words(rng, entries)]
        numbers = [f"{number:0{DIGITS}d}" for number in rng.sample(range(10**DIGITS), entries)]
        book = [f"{name}: {number}" for name, number in zip(names, numbers, strict=True)]
        asked = rng.randrange(entries)
        others = [f" {number}" for i, number in enumerate(numbers) if i != asked]
        candidates, answer = shuffled_candidates(rng, f" {numbers[asked]}", others)
        prompt = "\n".join([*book, f"{names[asked]}:"])
        return Example(prompt, candidates, answer, {"place": asked / max(1, entries - 1)})
