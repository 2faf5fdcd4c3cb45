"""Multi-query associative recall (Arora et al., arXiv 2312.04927): pairs of a key and a value, then
keys again, each of which asks for its value."""

import random
from itertools import chain

from diffllm.tasks.task import Count, Example, Level, Task, shuffled_candidates, task
from diffllm.tasks.words import pool, words

QUERIES = 4


@task("mqar", pairs=(4, 8, 16, 32, 64, 128, 256))
class Mqar(Task):
    """The last of some queries is the one that is scored; the answers of those before it stand.

    All stands in one line, in which every word, the first too, follows a space: as a key and as a
    value it is the same tokens.

    A level's `words` are those that keys and values are drawn from; all 8,100 where it has none. Of
    few words each can be a token of its own.
    """

    optional = ("words",)

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        pairs = int(level["pairs"])
        drawn = words(rng, 2 * pairs, pool(level))
        keys, values = drawn[:pairs], drawn[pairs:]
        asked = rng.sample(range(pairs), rng.randint(1, min(QUERIES, pairs // 2)))
        told = [f" {keys[i]} {values[i]}" for i in range(pairs)]
        answered = [f" {keys[i]} {values[i]}" for i in asked[:-1]]
        last = asked[-1]
        # Values told again would be answers by frequency.
        open_ones = [i for i in range(pairs) if i not in asked]
        candidates, answer = shuffled_candidates(
            rng, f" {values[last]}", [f" {values[i]}" for i in open_ones]
        )
        prompt = ",".join([*told, *answered, f" {keys[last]}"])
        return Example(prompt, candidates, answer, {"place": last / max(1, pairs - 1)})

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Make pairs, and all of them once more in another order; values follow from their keys."""
        pairs = int(level["pairs"])
        drawn = words(rng, 2 * pairs, pool(level))
        told = list(zip(drawn[:pairs], drawn[pairs:], strict=True))
        asked = [(f", {key}", f" {value}") for key, value in rng.sample(told, pairs)]
        first, *others = chain.from_iterable(asked)
        return (",".join(f" {key} {value}" for key, value in told) + first, *others)
