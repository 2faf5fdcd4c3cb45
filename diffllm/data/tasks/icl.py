"""Built-in task of many-shot classification in context (icl).

The task uses invented words of four letters, such as "bako". Tokenizers usually split such a word
into several tokens.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

from diffllm.data.tasks.task import Count, Example, Level, Seed, Task, task
from diffllm.data.tasks.words import CONSONANTS, LABELS, VOWELS

RULES, ORDERS = 50, 4


class Shots(NamedTuple):
    """Labelled words and a query word.

    `shown` contains pairs of a word and its label (0 or 1). `right` is the label of `query`.
    """

    shown: list[tuple[str, int]]
    query: str
    right: int


@task("icl", shots=(4, 8, 16, 32, 64, 128))
class Icl(Task):
    """Many-shot classification in context.

    A prompt contains words with labels, then a word to classify. The first consonant of a word
    determines its label by a random rule. The examples form groups of four. The examples of a group
    are not independent: they have the same words and rule, but different word orders and label
    names.
    """

    by = ("order", "labels")
    cluster = "rule"

    def number(self, level: Level) -> int:
        return RULES * ORDERS

    def examples(self, level: Level, number: int, seed: Seed, count: Count) -> Iterator[Example]:
        """Generate `number` examples of difficulty `level`, in blocks of 200 examples.

        A block uses 50 random sets of words, each with a rule that assigns labels to words. Each
        set occurs in four examples, 50 examples apart, with different word orders and label names.
        """
        for i in range(number):
            block, place = divmod(i, RULES * ORDERS)
            order, rule = divmod(place, RULES)
            rule += RULES * block
            # Seeded by the rule, not by the example, so that four examples share words and rule.
            rng = random.Random(f"{self.name}/{level['shots']}/{seed}/{rule}")
            shots = self.shots(rng, int(level["shots"]), rule % 2)
            # Another generator, because the order differs between the four examples.
            order_rng = random.Random(f"{level['shots']}/{seed}/{rule}/{order}")
            order_rng.shuffle(shots.shown)
            # Rules 2k and 2k + 1 have different right labels but the same names, so that within an
            # order both labels are right for each pair of names.
            names = LABELS[(rule // 2 + order) % len(LABELS)]
            facts = {"rule": rule, "order": order, "labels": "/".join(names)}
            yield self.example_of(shots, names, facts)

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        right = rng.randrange(2)
        shots = self.shots(rng, int(level["shots"]), right)
        rng.shuffle(shots.shown)
        return self.example_of(shots, rng.choice(LABELS), {})

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Generate a training text: words, each followed by its label.

        Return strings that alternate between context and label; the loss applies to labels. If no
        earlier word begins with the same consonant, the label is part of the context instead.
        """
        right = rng.randrange(2)
        shots = self.shots(rng, int(level["shots"]), right)
        rng.shuffle(shots.shown)
        names = rng.choice(LABELS)
        pieces = [""]
        seen_consonants = set()
        for word, label in (*shots.shown, (shots.query, shots.right)):
            name = f" {names[label]}"
            pieces[-1] += f" {word} ->"
            # The label of a new consonant cannot be known, because the rule is random.
            if word[0] in seen_consonants:
                pieces.append(name)
                pieces.append("")
            else:
                pieces[-1] += name
            seen_consonants.add(word[0])
        # A shot begins with the consonant of the query, so the text ends with a predicted label.
        return tuple(pieces[:-1])

    def shots(self, rng: random.Random, number: int, right: int) -> Shots:
        # An even number of consonants, so that both labels have equally many.
        half = len(CONSONANTS) // 2
        consonants = rng.sample(CONSONANTS, 2 * half)
        consonants_by_label = (consonants[:half], consonants[half:])
        shown = []
        for i in range(2 * (number // 2)):
            label = i % 2
            word = self.word(rng, consonants_by_label[label])
            shown.append((word, label))
        first = rng.choice(consonants_by_label[right])
        query = self.word(rng, [first])
        shown_words = {word for word, _ in shown if word.startswith(first)}
        # Without this check, the loop below would not end.
        if len(shown_words) == len(VOWELS) ** 2 * len(CONSONANTS):
            raise ValueError(f"{number:,} shots leave no other word that begins with {first}")
        while query in shown_words:
            query = self.word(rng, [first])
        # At least one shot begins with the consonant of the query, which determines the label.
        places = [i for i, (_, label) in enumerate(shown) if label == right]
        place = rng.choice(places)
        hint = self.word(rng, [first], query)
        shown[place] = (hint, right)
        return Shots(shown, query, right)

    def example_of(self, shots: Shots, names: tuple[str, str], facts: dict[str, object]) -> Example:
        prompt = ""
        for word, label in shots.shown:
            prompt += f" {word} -> {names[label]}"
        prompt += f" {shots.query} ->"
        # Not shuffled: the candidates have the order of the labels, 0 and 1.
        candidates = (f" {names[0]}", f" {names[1]}")
        return Example(prompt, candidates, shots.right, facts)

    def word(self, rng: random.Random, consonants: list[str], other: str = "") -> str:
        """Draw an invented word that begins with one of `consonants` and differs from `other`."""
        while True:
            first = rng.choice(consonants) + rng.choice(VOWELS)
            second = rng.choice(CONSONANTS) + rng.choice(VOWELS)
            word = first + second
            if word != other:
                return word
