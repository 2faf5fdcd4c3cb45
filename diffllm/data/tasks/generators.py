"""The built-in tasks: many-shot classification, associative recall, needles. Words are two
syllables without meaning, as "bako": equally long, and unknown to tokenizers."""

import random
from collections.abc import Iterator
from itertools import chain

from diffllm.data.tasks.task import Count, Example, Level, Seed, Task, shuffled_candidates, task

CONSONANTS, VOWELS = "bdfghjklmnprstvwyz", "aeiou"
SYLLABLES = tuple(consonant + vowel for consonant in CONSONANTS for vowel in VOWELS)
ORDERS, LABELS = 4, (("red", "blue"), ("A", "B"), ("foo", "bar"), ("yes", "no"))
QUERIES = 4
NEEDLES, ASKED, DEPTHS = 6, 2, 5
DIGITS = 4
SHARES = (0.96, 0.72, 0.5, 0.36, 0.25)
"""Context lengths over the model's."""
ROOM = 24
"""Unused tokens of a context."""
SUBJECTS = (
    "The old man", "A small bird", "The tall tree", "My sister", "The green boat", "A quiet dog",
    "The long road", "Our teacher", "The cold rain", "A bright star",
)  # fmt: skip
VERBS = (
    "goes to", "looks at", "waits for", "thinks of", "moves past", "stands near", "turns from",
    "sings about", "sleeps by", "comes back to",
)  # fmt: skip
OBJECTS = (
    "the river", "the market", "an open door", "the hill", "the stone wall", "a garden", "the sea",
    "the last house", "the field", "a window",
)  # fmt: skip


def words(rng: random.Random, count: int, level: Level) -> list[str]:
    """Draw different words, of which the level may limit the number; raises ValueError."""
    every = len(SYLLABLES) ** 2
    known = int(level.get("words", every))
    if not count <= known <= every:
        raise ValueError(f"{count:,} different words are wanted of {known:,} (at most {every:,})")
    places = (divmod(number, len(SYLLABLES)) for number in rng.sample(range(known), count))
    return [SYLLABLES[first] + SYLLABLES[second] for first, second in places]


@task("icl", shots=(4, 8, 16, 32, 64, 128))
class Icl(Task):
    """Many-shot classification in context.

    The first consonant of a word determines its label, by a rule drawn per example. Each run of
    ORDERS * len(LABELS) examples has the same shots and query, in several orders and with several
    label names.
    """

    by = ("order", "labels")

    def examples(self, level: Level, number: int, seed: Seed, count: Count) -> Iterator[Example]:
        for i in range(number):
            rule, way = divmod(i, ORDERS * len(LABELS))
            rng = random.Random(f"{self.name}/{level['shots']}/{seed}/{rule}")
            yield self.asked(rng, int(level["shots"]), rule, *divmod(way, len(LABELS)))

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        return self.asked(rng, int(level["shots"]), rng.randrange(2), rng.randrange(ORDERS), 0)

    def asked(self, rng: random.Random, shots: int, rule: int, order: int, names: int) -> Example:
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


@task("mqar", pairs=(4, 8, 16, 32, 64, 128, 256))
class Mqar(Task):
    """Multi-query associative recall (Arora et al., arXiv 2312.04927): key-value pairs, then keys
    again. Only the last query is scored; earlier queries come with their answers.

    Every word follows a space, so that it has the same tokens as key and value. The setting `words`
    limits the vocabulary (default all 8,100): each of few words can be one token.
    """

    optional = ("words",)

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        pairs = int(level["pairs"])
        drawn = words(rng, 2 * pairs, level)
        keys, values = drawn[:pairs], drawn[pairs:]
        asked = rng.sample(range(pairs), rng.randint(1, min(QUERIES, pairs // 2)))
        told = [f" {keys[i]} {values[i]}" for i in range(pairs)]
        *before, last = asked
        answered = [told[i] for i in before]
        # Values told again would be answers by frequency.
        others = [f" {values[i]}" for i in range(pairs) if i not in asked]
        candidates, answer = shuffled_candidates(rng, f" {values[last]}", others)
        prompt = ",".join([*told, *answered, f" {keys[last]}"])
        return Example(prompt, candidates, answer, {"place": last / max(1, pairs - 1)})

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Make pairs, and repeat all in another order; values are predicted."""
        pairs = int(level["pairs"])
        drawn = words(rng, 2 * pairs, level)
        told = list(zip(drawn[:pairs], drawn[pairs:], strict=True))
        asked = [(f", {key}", f" {value}") for key, value in rng.sample(told, pairs)]
        first, *others = chain.from_iterable(asked)
        return (",".join(f" {key} {value}" for key, value in told) + first, *others)


@task("needle", length=(), needles=(), asked=())
class Needle(Task):
    """Retrieval of needles from a haystack (multi-needle, as in section 3.4 of arXiv 2410.05258).

    Sentences with the magic numbers of N cities lie in unrelated text, at evenly spaced depths; R
    of them are asked for, and the last one is scored. The candidates are the numbers of all needles
    that have not been repeated. The setting `words` limits the city names.
    """

    by = ("depth",)
    optional = ("words",)

    def levels(self, length: int) -> list[Level]:
        found = []
        for tokens in sorted({max(100, round(share * length)) for share in SHARES}):
            needles, asked = (NEEDLES, ASKED) if tokens >= 400 else (3 if tokens >= 150 else 2, 1)
            found.append({"length": tokens, "needles": needles, "asked": asked})
        return [level for level in found if level["length"] <= length]

    def examples(self, level: Level, number: int, seed: Seed, count: Count) -> Iterator[Example]:
        needles = int(level["needles"])
        for text in range(-(-number // needles)):
            rng = self.generator(level, seed, text)
            told = self.told(rng, level, count)
            for last in range(min(needles, number - text * needles)):
                yield self.asked(rng, level, *told, last)

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        told = self.told(rng, level, count)
        return self.asked(rng, level, *told, rng.randrange(int(level["needles"])))

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Make a text, and ask for all its needles; numbers are predicted."""
        text, needle_of = self.told(rng, {**level, "asked": level["needles"]}, count)
        pieces = [text]
        for city in rng.sample(sorted(needle_of), len(needle_of)):
            pieces[-1] += f" {question(city)}"
            pieces += [f" {needle_of[city]}", "."]
        return tuple(pieces[:-1])

    def told(self, rng: random.Random, level: Level, count: Count) -> tuple[str, dict[str, str]]:
        needles, asked = int(level["needles"]), int(level["asked"])
        cities = [name.capitalize() for name in words(rng, needles, level)]
        drawn = rng.sample(range(10**DIGITS), needles)
        needle_of = {
            city: f"{number:0{DIGITS}d}" for city, number in zip(cities, drawn, strict=True)
        }
        said = [sentence(*pair) for pair in needle_of.items()]
        tail = " ".join(said[:asked])  # any of them; all are about as long
        left = int(level["length"]) - ROOM - count(" ".join([*said, tail]))
        hay: list[str] = []
        while True:
            straw = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}."
            left -= count(f" {straw}")
            if left < 0:
                break
            hay.append(straw)
        straws = len(hay)
        for n in reversed(range(needles)):  # the last first, so that earlier places stay the same
            hay.insert(round((n + 0.5) * straws / needles), said[n])
        return " ".join(hay), needle_of

    def asked(
        self, rng: random.Random, level: Level, text: str, needle_of: dict[str, str], last: int
    ) -> Example:
        """Make the example whose last question is that city. Answered numbers are no candidates:
        their repetition would make them likely."""
        cities = list(needle_of)
        city = cities.pop(last)
        before = rng.sample(cities, int(level["asked"]) - 1)
        answered = [sentence(other, needle_of[other]) for other in before]
        others = [f" {needle_of[other]}" for other in cities if other not in before]
        candidates, answer = shuffled_candidates(rng, f" {needle_of[city]}", others)
        prompt = " ".join([text, *answered, question(city)])
        bucket = min(DEPTHS - 1, int(DEPTHS * (last + 0.5) / len(needle_of)))
        return Example(prompt, candidates, answer, {"depth": bucket / (DEPTHS - 1)})


def sentence(city: str, number: str) -> str:
    return f"{question(city)} {number}."


def question(city: str) -> str:
    return f"The magic number of {city} is"
