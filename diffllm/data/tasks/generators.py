"""Built-in tasks: associative recall (mqar), needles in a haystack, many-shot classification (icl).

The tasks needle and icl use invented words of four letters, such as "bako". Tokenizers usually
split such a word into several tokens.
"""

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from diffllm.data.tasks.task import Count, Example, Level, Seed, Task, shuffled_candidates, task

PAIRS = (2, 4, 8, 16)
QUERIES = 4
KEYS = (
    "arg", "base", "block", "byte", "case", "child", "class", "code", "command", "data", "dir",
    "element", "error", "event", "file", "format", "frame", "handler", "header", "line", "list",
    "loop", "message", "method", "mode", "module", "name", "node", "number", "object", "path",
    "print",
)  # fmt: skip
VALUES = (
    "count", "current", "default", "dict", "first", "float", "given", "int", "lambda", "last",
    "local", "max", "memory", "mock", "next", "offset", "option", "output", "range", "result",
    "server", "set", "sign", "size", "socket", "source", "state", "string", "text", "thread",
    "time", "tuple",
)  # fmt: skip
FILLER = (
    "add", "after", "all", "and", "any", "are", "but", "can", "does", "for", "from", "get", "have",
    "into", "more", "must", "not", "one", "only", "other", "over", "same", "should", "some", "than",
    "that", "the", "then", "this", "was", "when", "with",
)  # fmt: skip
"""Words that most tokenizers of English text or source code encode as one token."""
CONSONANTS, VOWELS = "bdfghjklmnprstvwyz", "aeiou"
SYLLABLES = tuple(consonant + vowel for consonant in CONSONANTS for vowel in VOWELS)
LEAST_LENGTH, LENGTHS = 512, 5
NEEDLES, QUERIED_NEEDLES, DEPTHS = 6, 2, 5
SAMPLES_PER_DEPTH = 50
LEAST_HAY = 20
DIGITS = 4
ROOM = 8
"""Reserve of tokens per context, for tokenizers that merge or split where texts are joined."""
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
RULES, ORDERS = 50, 4
LABELS = (("red", "blue"), ("A", "B"), ("foo", "bar"), ("yes", "no"))


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
    for words in (KEYS, VALUES, FILLER):
        single_tokens = tuple(filter(is_token, words))
        kinds.append(single_tokens if len(single_tokens) >= PAIRS[-1] else words)
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
            recall = self.drawn(rng, PAIRS[-1 - i % len(PAIRS)], level, count)
            yield self.example_of(recall, rng)

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        return self.example_of(self.drawn(rng, rng.choice(PAIRS), level, count), rng)

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Generate a training text: key-value pairs and filler, then queries with their answers.

        Return strings that alternate between context and answer; the loss applies to answers.
        About 75% of the texts contain only two pairs, which small models learn first.
        """
        (pairs,) = rng.choices(PAIRS, [pairs**-2 for pairs in PAIRS])
        recall = self.drawn(rng, pairs, level, count)
        pieces = [recall.context]
        for i in recall.queried:
            pieces[-1] += f" {recall.keys[i]}"
            pieces += [f" {recall.values[i]}", ""]
        # The last piece is the empty context after the last answer.
        return tuple(pieces[:-1])

    def drawn(self, rng: random.Random, pairs: int, level: Level, count: Count) -> Recall:
        all_keys, all_values, all_filler = vocabulary(count)
        keys = rng.sample(all_keys, pairs)
        values = rng.sample(all_values, pairs)
        words: list[str] = []
        for pair in zip(keys, values, strict=True):
            words += pair
        words += rng.choices(all_filler, k=int(level["filler"]))
        # At most half of the keys, so that elimination does not find the answer.
        queried = rng.sample(range(pairs), min(QUERIES, pairs // 2))
        return Recall("".join(f" {word}" for word in words), keys, values, queried)

    def example_of(self, recall: Recall, rng: random.Random) -> Example:
        """Make an example from the pairs and queries in `recall`; only the last query is scored.

        The answers of earlier queries are not candidates, because the prompt repeats these answers
        and models tend to choose repeated values.
        """
        context, keys, values, (*before, last) = recall
        others = [f" {value}" for i, value in enumerate(values) if i not in recall.queried]
        candidates, answer = shuffled_candidates(rng, f" {values[last]}", others)
        answered = "".join(f" {keys[i]} {values[i]}" for i in before)
        pair = f"{keys[last]} {values[last]}"
        start = context.index(f" {pair}") + 1
        facts = {"pairs": len(keys), "place": last / (len(keys) - 1)}
        evidence = (start, start + len(pair))
        return Example(f"{context}{answered} {keys[last]}", candidates, answer, facts, evidence)


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
        settings = {"needles": NEEDLES, "queries": QUERIED_NEEDLES}
        return [{"length": length, **settings} for length in lengths[-LENGTHS:]]

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
            yield self.example_of(self.haystack(rng, depth, level, count), depth, rng)

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        depth = rng.randrange(DEPTHS)
        return self.example_of(self.haystack(rng, depth, level, count), depth, rng)

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Generate a training text: a haystack, then queries with their answers.

        Return strings that alternate between context and answer; the loss applies to answers.
        """
        text, needles, queried = self.haystack(rng, rng.randrange(DEPTHS), level, count)
        pieces = [text]
        for city in queried:
            pieces[-1] += f" {question(city)}"
            pieces += [f" {needles[city]}", "."]
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
        cities: list[str] = []
        for pair in rng.sample(range(len(SYLLABLES) ** 2), number):
            first, second = divmod(pair, len(SYLLABLES))
            cities.append(f"{SYLLABLES[first]}{SYLLABLES[second]}".capitalize())
        numbers = rng.sample(range(10**DIGITS), number)
        needles = {c: f"{n:0{DIGITS}d}" for c, n in zip(cities, numbers, strict=True)}
        queried = rng.sample(cities, queries)
        depth_of = {city: rng.randrange(DEPTHS) for city in cities}
        depth_of[queried[-1]] = depth
        # A queried city occurs twice in a prompt: as a needle and as a query with its answer.
        sentences = [sentence(city, needles[city]) for city in (*cities, *queried)]
        # Minus 1, because an EOS precedes the text.
        remaining = int(level["length"]) - 1 - ROOM - count(" ".join(sentences))
        hay: list[str] = []
        while True:
            straw = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}."
            remaining -= tokens_of_straw(count, straw)
            if remaining < 0:
                break
            hay.append(straw)
        straws = len(hay)
        if straws < LEAST_HAY:
            raise ValueError(f"{straws} sentences of hay fit; at least {LEAST_HAY} are needed")
        # Insert the deepest needles first, so that earlier places do not move.
        for city in sorted(cities, key=lambda city: -depth_of[city]):
            hay.insert(round(depth_of[city] / (DEPTHS - 1) * straws), sentence(city, needles[city]))
        return Haystack(" ".join(hay), needles, queried)

    def example_of(self, haystack: Haystack, depth: int, rng: random.Random) -> Example:
        """Make an example from `haystack`; only the last query is scored.

        The answers of earlier queries are not candidates, because the prompt repeats these answers
        and models tend to choose repeated numbers. `depth` is stored in `Example.facts`.
        """
        text, needles, (*before, last) = haystack
        others = [f" {number}" for city, number in needles.items() if city not in haystack.queried]
        candidates, answer = shuffled_candidates(rng, f" {needles[last]}", others)
        answered = [sentence(city, needles[city]) for city in before]
        prompt = " ".join([text, *answered, question(last)])
        needle = sentence(last, needles[last])
        start = text.index(needle)
        evidence = (start, start + len(needle))
        return Example(prompt, candidates, answer, {"depth": depth / (DEPTHS - 1)}, evidence)


@lru_cache(len(SUBJECTS) * len(VERBS) * len(OBJECTS))  # Counting takes most of the time.
def tokens_of_straw(count: Count, straw: str) -> int:
    return count(f" {straw}")


def sentence(city: str, number: str) -> str:
    return f"{question(city)} {number}."


def question(city: str) -> str:
    return f"The magic number of {city} is"


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
            shots = self.drawn(rng, int(level["shots"]), rule % 2)
            names = (rule // 2 + order) % len(LABELS)
            random.Random(f"{level['shots']}/{seed}/{rule}/{order}").shuffle(shots.shown)
            facts = {"rule": rule, "order": order, "labels": "/".join(LABELS[names])}
            yield self.example_of(shots, LABELS[names], facts)

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        shots = self.drawn(rng, int(level["shots"]), rng.randrange(2))
        rng.shuffle(shots.shown)
        return self.example_of(shots, rng.choice(LABELS), {})

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Generate a training text: words, each followed by its label.

        Return strings that alternate between context and label; the loss applies to labels. If no
        earlier word begins with the same consonant, the label is part of the context instead.
        """
        shots = self.drawn(rng, int(level["shots"]), rng.randrange(2))
        rng.shuffle(shots.shown)
        names = rng.choice(LABELS)
        pieces = [""]
        seen = set()
        for word, label in (*shots.shown, (shots.query, shots.right)):
            pieces[-1] += f" {word} ->"
            if word[0] in seen:
                pieces += [f" {names[label]}", ""]
            else:
                pieces[-1] += f" {names[label]}"
            seen.add(word[0])
        return tuple(pieces[:-1])

    def drawn(self, rng: random.Random, shots: int, right: int) -> Shots:
        consonants = rng.sample(CONSONANTS, 2 * (len(CONSONANTS) // 2))
        half = len(consonants) // 2
        of_label = (consonants[:half], consonants[half:])
        labels = [0, 1] * (shots // 2)
        shown = [(self.word(rng, of_label[label]), label) for label in labels]
        first = rng.choice(of_label[right])
        query = self.word(rng, [first])
        seen = {word for word, _ in shown if word.startswith(first)}
        if len(seen) == len(VOWELS) ** 2 * len(CONSONANTS):
            raise ValueError(f"{shots:,} shots leave no other word that begins with {first}")
        while query in seen:
            query = self.word(rng, [first])
        # At least one shot begins with the consonant of the query, which determines the label.
        place = rng.choice([i for i, (_, label) in enumerate(shown) if label == right])
        shown[place] = (self.word(rng, [first], query), right)
        return Shots(shown, query, right)

    def example_of(self, shots: Shots, names: tuple[str, str], facts: dict[str, object]) -> Example:
        context = "".join(f" {word} -> {names[label]}" for word, label in shots.shown)
        candidates = (f" {names[0]}", f" {names[1]}")
        return Example(f"{context} {shots.query} ->", candidates, shots.right, facts)

    def word(self, rng: random.Random, consonants: list[str], other: str = "") -> str:
        """Draw an invented word that begins with one of `consonants` and differs from `other`."""
        while True:
            first = rng.choice(consonants) + rng.choice(VOWELS)
            word = first + rng.choice(CONSONANTS) + rng.choice(VOWELS)
            if word != other:
                return word
