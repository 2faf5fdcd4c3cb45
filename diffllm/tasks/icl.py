"""Many-shot classification in context, whose order and labels should not matter.

A word's label follows from the consonant of its first syllable, by a rule drawn for the example.
The same shots are shown in several orders, and with several sets of label names.
"""

import random
from collections.abc import Iterator

from diffllm.tasks.task import Count, Example, Level, Seed, Task, task
from diffllm.tasks.words import CONSONANTS, VOWELS

ORDERS, LABELS = 4, (("red", "blue"), ("A", "B"), ("foo", "bar"), ("yes", "no"))
"""Orders of the shots, and names of labels, that each rule is asked with."""


@task("icl", shots=(4, 8, 16, 32, 64, 128))
class Icl(Task):
    """Each run of ORDERS * len(LABELS) examples asks the same of the same shots."""

    by = ("order", "labels")

    def examples(self, level: Level, number: int, seed: Seed, count: Count) -> Iterator[Example]:
        for i in range(number):
            rule, way = divmod(i, ORDERS * len(LABELS))
            rng = random.Random(f"{self.name}/{level['shots']}/{seed}/{rule}")
            yield self.asked(rng, int(level["shots"]), rule, *divmod(way, len(LABELS)))

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        return self.asked(rng, int(level["shots"]), rng.randrange(2), rng.randrange(ORDERS), 0)

    def asked(self, rng: random.Random, shots: int, rule: int, order: int, names: int) -> Example:
        """Make an example of a rule, in one order and with one pair of names."""
        consonants = rng.sample(CONSONANTS, 2 * (len(CONSONANTS) // 2))
        half = len(consonants) // 2
        of_label = (consonants[:half], consonants[half:])
        labels = [0, 1] * (shots // 2)
        shown = [(self.word(rng, of_label[label]), label) for label in labels]
        right = rule % 2
        first = rng.choice(of_label[right])
        query = self.word(rng, [first])
        seen = {each for each, _ in shown if each.startswith(first)}
        if len(seen) == len(VOWELS) ** 2 * len(CONSONANTS):
            raise ValueError(f"{shots:,} shots leave no other word that begins with {first}")
        while query in seen:
            query = self.word(rng, [first])
        # A shot of the query's own consonant tells the rule; one is always among them.
        place = rng.choice([i for i, (_, label) in enumerate(shown) if label == right])
        shown[place] = (self.word(rng, [first]), right)
        random.Random(f"{order}").shuffle(shown)
        named = LABELS[names]
        lines = [f"{each} -> {named[label]}" for each, label in shown]
        prompt = "\n".join([*lines, f"{query} ->"])
        candidates = (f" {named[0]}", f" {named[1]}")
        facts = {"rule": rule, "order": order, "labels": "/".join(named)}
        return Example(prompt, candidates, right, facts)

    def word(self, rng: random.Random, consonants: list[str]) -> str:
        first = rng.choice(consonants) + rng.choice(VOWELS)
        return first + rng.choice(CONSONANTS) + rng.choice(VOWELS)
