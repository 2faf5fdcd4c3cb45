"""Retrieval of needles from a haystack (multi-needle, as in section 3.4 of arXiv 2410.05258).

N sentences that tell a city's magic number lie in text about nothing; R of them are asked for, one
behind the other, and the last one is scored. Needles lie at depths that divide the text evenly, and
the asked one is any of them: where it lies says nothing.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from diffllm.tasks.task import Count, Example, Level, Seed, Task, shuffled_candidates, task
from diffllm.tasks.words import pool, words

NEEDLES, ASKED, DEPTHS = 6, 2, 5
DIGITS = 4
SHARES = (0.96, 0.72, 0.5, 0.36, 0.25)
"""Lengths of the context over the model's."""
ROOM = 24
"""Tokens of a context that are left free, for what joins its parts and an answer's last tokens."""
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


@task("needle", length=(), needles=(), asked=())
class Needle(Task):
    """The answers are the numbers of all needles of the text that have not been told again.

    A level's `words` are those that cities are named by; all 8,100 where it has none.
    """

    by = ("depth",)
    optional = ("words",)

    def levels(self, length: int) -> list[Level]:
        shortest = 100
        lengths = sorted({max(shortest, round(share * length)) for share in SHARES})
        return [{"length": tokens, **needles_in(tokens)} for tokens in lengths if tokens <= length]

    def examples(self, level: Level, number: int, seed: Seed, count: Count) -> Iterator[Example]:
        """Make examples, each needle of a text the last of one, so that a text is read once."""
        needles = int(level["needles"])
        for text in range(-(-number // needles)):
            rng = self.generator(level, seed, text)
            told = self.told(rng, level, count)
            for last in range(min(needles, number - text * needles)):
                yield told.asked(rng, last)

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        return self.told(rng, level, count).asked(rng, rng.randrange(int(level["needles"])))

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Make a text with its needles, and ask for all of them; only numbers follow."""
        told = self.told(rng, {**level, "asked": level["needles"]}, count)
        pieces = [told.text]
        for city in rng.sample(sorted(told.needle_of), len(told.needle_of)):
            pieces[-1] += f" {question(city)}"
            pieces += [f" {told.needle_of[city]}", "."]
        return tuple(pieces[:-1])

    def told(self, rng: random.Random, level: Level, count: Count) -> "Told":
        """Draw a text with its needles."""
        needles, asked = int(level["needles"]), int(level["asked"])
        cities = [name.capitalize() for name in words(rng, needles, pool(level))]
        drawn = rng.sample(range(10**DIGITS), needles)
        needle_of = {
            city: f"{number:0{DIGITS}d}" for city, number in zip(cities, drawn, strict=True)
        }
        said = [sentence(*pair) for pair in needle_of.items()]
        tail = " ".join(said[:asked])  # any of them; all are about as long
        hay = haystack(rng, int(level["length"]) - ROOM - count(" ".join([*said, tail])), count)
        places = [round((i + 0.5) * len(hay) / needles) for i in range(needles)]
        text: list[str] = []
        for i, straw in enumerate(hay):
            text += [said[n] for n, place in enumerate(places) if place == i]
            text.append(straw)
        text += [said[n] for n, place in enumerate(places) if place >= len(hay)]
        return Told(" ".join(text), needle_of, asked)


@dataclass(frozen=True)
class Told:
    """A text with needles."""

    text: str
    needle_of: dict[str, str]
    """Cities, in the order of the text, to their numbers."""
    count: int
    """How many of them are asked for."""

    def asked(self, rng: random.Random, last: int) -> Example:
        """Make the example whose last question is that for one city; those before it are answered,
        and their numbers no candidates: told again, they would be answers by frequency."""
        cities = list(self.needle_of)
        city = cities.pop(last)
        before = rng.sample(cities, self.count - 1)
        answered = [sentence(other, self.needle_of[other]) for other in before]
        others = [f" {self.needle_of[other]}" for other in cities if other not in before]
        candidates, answer = shuffled_candidates(rng, f" {self.needle_of[city]}", others)
        prompt = " ".join([self.text, *answered, question(city)])
        bucket = min(DEPTHS - 1, int(DEPTHS * (last + 0.5) / len(self.needle_of)))
        return Example(prompt, candidates, answer, {"depth": bucket / (DEPTHS - 1)})


def sentence(city: str, number: str) -> str:
    return f"{question(city)} {number}."


def question(city: str) -> str:
    return f"The magic number of {city} is"


def needles_in(tokens: int) -> Level:
    """Return how many needles lie in so many tokens, and are asked for."""
    if tokens >= 400:
        return {"needles": NEEDLES, "asked": ASKED}
    return {"needles": 3 if tokens >= 150 else 2, "asked": 1}


def haystack(rng: random.Random, tokens: int, count: Count) -> list[str]:
    """Draw sentences of about so many tokens together."""
    hay: list[str] = []
    used = 0
    while True:
        sentence = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}."
        used += count(f" {sentence}")
        if used > tokens:
            return hay
        hay.append(sentence)
