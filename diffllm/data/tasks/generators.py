"""Built-in tasks of retrieval: associative recall (mqar) and needles in a haystack.

The cities of the task needle are invented words of four letters, such as "Bako". Tokenizers usually
split such a word into several tokens.
"""

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from diffllm.data.tasks.task import Count, Example, Level, Seed, Task, shuffled_candidates, task
from diffllm.data.tasks.words import FILLER, KEY_WORDS, OBJECTS, SUBJECTS, SYLLABLES, VALUES, VERBS

PAIRS = (2, 4, 8, 16)
QUERIES = 4
LEAST_LENGTH, LENGTHS = 512, 5
NEEDLES, QUERIED_NEEDLES, DEPTHS = 6, 2, 5
SAMPLES_PER_DEPTH = 50
LEAST_HAY = 20
NEEDLE_DIGITS = 4
ROOM = 8
"""Reserve of tokens per context, for tokenizers that merge or split where texts are joined."""


@lru_cache(maxsize=4)
def vocabulary(count: Count) -> tuple[tuple[str, ...], ...]:
    """Return the words that Mqar uses: a tuple of keys, a tuple of values, a tuple of filler words.

    If at least 16 words of a kind, such as keys, are one token each, the tuple contains only these
    words. Otherwise, it contains all words of this kind. `count` must return the number of tokens
    of a text.
    """

    def is_token(word: str) -> bool:
        return count(f" {word} {word}") - count(f" {word}") == 1

    kinds = []
    for words in (KEY_WORDS, VALUES, FILLER):
        single_tokens = tuple(filter(is_token, words))
        has_enough = len(single_tokens) >= PAIRS[-1]
        kinds.append(single_tokens if has_enough else words)
    return tuple(kinds)


class Recall(NamedTuple):
    """A text with key-value pairs, and the pairs that the queries after the text ask for.

    `context` contains the pairs and the filler words. Pair i is (keys[i], values[i]). `queried`
    contains the indices of the queried pairs.
    """

    context: str
    keys: list[str]
    values: list[str]
    queried: list[int]


@task("mqar", filler=(0, 16, 64, 256, 1024, 4096, 16384))
class Mqar(Task):
    """Multi-query associative recall (Arora et al., arXiv 2312.04927).

    A prompt contains 2 to 16 key-value pairs, then filler words, then queries. A query repeats a
    key; the answer is the value of this key. Only the last query is scored; earlier queries are
    followed by their answers. At most half of the keys are queried, so that the answer cannot be
    found by elimination. If the tokenizer has enough one-token words, only these are used.
    """

    by = ("pairs",)

    def examples(self, level: Level, number: int, seed: Seed, count: Count) -> Iterator[Example]:
        for i in range(number):
            rng = self.generator(level, seed, i)
            # Four consecutive examples have all numbers of pairs, so `longest` measures all.
            pairs = PAIRS[-1 - i % len(PAIRS)]
            recall = self.recall(rng, pairs, level, count)
            yield self.example_of(recall, rng)

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        pairs = rng.choice(PAIRS)
        recall = self.recall(rng, pairs, level, count)
        return self.example_of(recall, rng)

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Generate a training text: key-value pairs and filler, then queries with their answers.

        Return strings that alternate between context and answer; the loss applies to answers.
        About 75% of the texts contain only two pairs, which small models learn first.
        """
        weights = [pairs**-2 for pairs in PAIRS]
        (pairs,) = rng.choices(PAIRS, weights)
        recall = self.recall(rng, pairs, level, count)
        pieces = [recall.context]
        for i in recall.queried:
            pieces[-1] += f" {recall.keys[i]}"
            pieces.append(f" {recall.values[i]}")
            pieces.append("")
        # The last piece is the empty context after the last answer.
        return tuple(pieces[:-1])

    def recall(self, rng: random.Random, pairs: int, level: Level, count: Count) -> Recall:
        all_keys, all_values, all_filler = vocabulary(count)
        keys = rng.sample(all_keys, pairs)
        values = rng.sample(all_values, pairs)
        words: list[str] = []
        for key, value in zip(keys, values, strict=True):
            words.append(key)
            words.append(value)
        filler = int(level["filler"])
        words += rng.choices(all_filler, k=filler)
        # At most half of the keys, so that elimination does not find the answer.
        queries = min(QUERIES, pairs // 2)
        queried = rng.sample(range(pairs), queries)
        context = "".join(f" {word}" for word in words)
        return Recall(context, keys, values, queried)

    def example_of(self, recall: Recall, rng: random.Random) -> Example:
        """Make an example from the pairs and queries in `recall`; only the last query is scored.

        The answers of earlier queries are not candidates, because the prompt repeats these answers
        and models tend to choose repeated values.
        """
        context, keys, values, queried = recall
        *answered_keys, last = queried
        other_values = []
        for i, value in enumerate(values):
            if i not in queried:
                other_values.append(f" {value}")
        candidates, answer = shuffled_candidates(rng, f" {values[last]}", other_values)
        prompt = context
        for i in answered_keys:
            prompt += f" {keys[i]} {values[i]}"
        prompt += f" {keys[last]}"
        pair = f"{keys[last]} {values[last]}"
        # The evidence begins after the space.
        start = context.index(f" {pair}") + 1
        evidence = (start, start + len(pair))
        # From 0 for the first pair to 1 for the last pair.
        place = last / (len(keys) - 1)
        facts = {"pairs": len(keys), "place": place}
        return Example(prompt, candidates, answer, facts, evidence)


class Haystack(NamedTuple):
    text: str
    needles: dict[str, str]
    """Numbers by city."""
    queried: list[str]
    """Cities; the last one is scored."""


@task("needle", length=(), needles=(), queries=())
class Needle(Task):
    """Retrieval of needles from a haystack (multi-needle task, arXiv 2410.05258, section 3.4).

    A needle is a sentence that states the magic number of a city. Each needle is inserted into
    unrelated text at one of five depths. The prompt ends with queries for some of the
    cities; only the last query is scored. The candidates are the right number and the numbers of
    the cities without a query. A level sets the number of `needles`, the number of `queries`, and
    `length`, the maximum number of tokens of a prompt with its answer.
    """

    by = ("depth",)

    def number(self, level: Level) -> int:
        return DEPTHS * SAMPLES_PER_DEPTH

    def levels(self, length: int) -> list[Level]:
        lengths = [LEAST_LENGTH]
        while 2 * lengths[-1] <= length + 1:
            lengths.append(2 * lengths[-1])
        levels: list[Level] = []
        for level_length in lengths[-LENGTHS:]:
            levels.append({"length": level_length, "needles": NEEDLES, "queries": QUERIED_NEEDLES})
        return levels

    def longest(self, level: Level, count: Count) -> int:
        # Raises for an impossible level.
        next(self.examples(level, 1, 0, count))
        # An EOS precedes the text.
        return int(level["length"]) - 1

    def examples(self, level: Level, number: int, seed: Seed, count: Count) -> Iterator[Example]:
        for i in range(number):
            rng = self.generator(level, seed, i)
            # Equally many examples per depth, because accuracy is reported by depth.
            depth = i % DEPTHS
            haystack = self.haystack(rng, depth, level, count)
            yield self.example_of(haystack, depth, rng)

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        depth = rng.randrange(DEPTHS)
        haystack = self.haystack(rng, depth, level, count)
        return self.example_of(haystack, depth, rng)

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Generate a training text: a haystack, then queries with their answers.

        Return strings that alternate between context and answer; the loss applies to answers.
        """
        depth = rng.randrange(DEPTHS)
        text, needles, queried = self.haystack(rng, depth, level, count)
        pieces = [text]
        for city in queried:
            pieces[-1] += f" {question(city)}"
            pieces.append(f" {needles[city]}")
            # The next context begins with the full stop of this answer.
            pieces.append(".")
        # The text ends with the last answer.
        return tuple(pieces[:-1])

    def haystack(self, rng: random.Random, depth: int, level: Level, count: Count) -> Haystack:
        """Generate a haystack in which the needle of the last query is at `depth`.

        Depth 0 is the start of the haystack, and depth 4 is the end. `level` contains the settings
        "length", "needles" and "queries". Raises ValueError if "queries" is less than 1 or greater
        than "needles", or if "length" is too small for 20 unrelated sentences.
        """
        number = int(level["needles"])
        queries = int(level["queries"])
        if not 1 <= queries <= number:
            raise ValueError(f"queries={queries:,} must be between 1 and needles={number:,}")
        needles = self.needles(rng, number)
        cities = list(needles)
        queried = rng.sample(cities, queries)
        depths = {city: rng.randrange(DEPTHS) for city in cities}
        depths[queried[-1]] = depth
        # A queried city occurs twice in a prompt: as a needle and as a query with its answer.
        sentences = [sentence(city, needles[city]) for city in cities + queried]
        needle_tokens = count(" ".join(sentences))
        # Minus 1, because an EOS precedes the text.
        remaining = int(level["length"]) - 1 - ROOM - needle_tokens
        hay: list[str] = []
        while True:
            subject = rng.choice(SUBJECTS)
            verb = rng.choice(VERBS)
            complement = rng.choice(OBJECTS)
            straw = f"{subject} {verb} {complement}."
            remaining -= tokens_of_straw(count, straw)
            if remaining < 0:
                break
            hay.append(straw)
        straws = len(hay)
        if straws < LEAST_HAY:
            raise ValueError(f"{straws} sentences of hay fit; at least {LEAST_HAY} are needed")
        # Insert the deepest needles first, so that earlier places do not move.
        for city in sorted(cities, key=lambda city: -depths[city]):
            place = round(depths[city] / (DEPTHS - 1) * straws)
            hay.insert(place, sentence(city, needles[city]))
        return Haystack(" ".join(hay), needles, queried)

    def needles(self, rng: random.Random, number: int) -> dict[str, str]:
        """Draw `number` invented cities with numbers; return the numbers by city."""
        # A pair of syllables is drawn as one number, so that all cities differ.
        pairs = rng.sample(range(len(SYLLABLES) ** 2), number)
        values = rng.sample(range(10**NEEDLE_DIGITS), number)
        needles: dict[str, str] = {}
        for pair, value in zip(pairs, values, strict=True):
            first, second = divmod(pair, len(SYLLABLES))
            city = SYLLABLES[first] + SYLLABLES[second]
            needles[city.capitalize()] = f"{value:0{NEEDLE_DIGITS}d}"
        return needles

    def example_of(self, haystack: Haystack, depth: int, rng: random.Random) -> Example:
        """Make an example from `haystack`; only the last query is scored.

        The answers of earlier queries are not candidates, because the prompt repeats these answers
        and models tend to choose repeated numbers. `depth` is stored in `Example.facts`.
        """
        text, needles, queried = haystack
        *answered_cities, last = queried
        other_numbers = []
        for city, number in needles.items():
            if city not in queried:
                other_numbers.append(f" {number}")
        candidates, answer = shuffled_candidates(rng, f" {needles[last]}", other_numbers)
        prompt = text
        for city in answered_cities:
            prompt += f" {sentence(city, needles[city])}"
        prompt += f" {question(last)}"
        needle = sentence(last, needles[last])
        start = text.index(needle)
        evidence = (start, start + len(needle))
        # From 0 for the start of the text to 1 for its end.
        facts = {"depth": depth / (DEPTHS - 1)}
        return Example(prompt, candidates, answer, facts, evidence)


# Counting takes most of the time, and the same sentences occur again in every haystack.
@lru_cache(len(SUBJECTS) * len(VERBS) * len(OBJECTS))
def tokens_of_straw(count: Count, straw: str) -> int:
    return count(f" {straw}")


def sentence(city: str, number: str) -> str:
    return f"{question(city)} {number}."


def question(city: str) -> str:
    return f"The magic number of {city} is"
