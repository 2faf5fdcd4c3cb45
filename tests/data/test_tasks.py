"""Generated tasks: one right answer that the text gives away, and no way to it but reading."""

import math
import random
import re
from collections.abc import Callable

import pytest
from tiers import slow_but

from diffllm.core.errors import ConfigError
from diffllm.data.tasks import generators
from diffllm.data.tasks.task import TASKS, Example, Level, Task, levels_of, task
from diffllm.evaluation import suite

LENGTH = 2048
CASES = 2000
NEAR = 0.02
NAMES = list(suite.SUITES["claims"])


def count(text: str) -> int:
    """Tokens as a tokenizer without merges of words has them."""
    return len(re.findall(r"\w{1,3}|\W", text))


def levels() -> list[tuple[str, int]]:
    """Every level that the suite has for a model of LENGTH tokens."""
    return [(name, i) for name in NAMES for i in range(len(TASKS[name].levels(LENGTH)))]


def examples(name: str, level: Level, number: int) -> list[Example]:
    return list(TASKS[name].examples(level, number, 0, count))


def last_line(example: Example) -> str:
    return example.prompt.splitlines()[-1]


def oracle(name: str, example: Example) -> str:
    """The right answer, as a reader of the rules finds it."""
    lines = example.prompt.splitlines()
    if name == "mqar":
        *pairs, asked = example.prompt.split(",")
        return " " + dict(pair.split() for pair in pairs)[asked.strip()]
    if name == "needle":
        told = dict(re.findall(r"The magic number of (\w+) is (\d+)\.", example.prompt))
        (asked,) = re.findall(r"The magic number of (\w+) is$", example.prompt)
        return " " + told[asked]
    rules = {line[0]: line.split(" -> ")[1] for line in lines[:-1]}
    return " " + rules[lines[-1][0]]


def at(example: Example, candidate: str) -> int:
    """Where a candidate stands last in the prompt."""
    return max(
        m.start() for m in re.finditer(rf"\b{re.escape(candidate.strip())}\b", example.prompt)
    )


def chosen_by(best: Callable[[Example, str], float]) -> Callable[[Example], list[str]]:
    """The candidates that a score likes best; all of them where it cannot tell them apart."""

    def choose(example: Example) -> list[str]:
        scores = {candidate: best(example, candidate) for candidate in example.candidates}
        return [c for c, score in scores.items() if score == max(scores.values())]

    return choose


def frequency(example: Example, candidate: str) -> float:
    return len(re.findall(rf"\b{re.escape(candidate.strip())}\b", example.prompt))


SHORTCUTS: dict[str, Callable[[Example], list[str]]] = {
    "the last": chosen_by(at),
    "the first": chosen_by(lambda example, candidate: -at(example, candidate)),
    "the most frequent": chosen_by(frequency),
    "the rarest": chosen_by(lambda example, candidate: -frequency(example, candidate)),
    "the first candidate": lambda example: [example.candidates[0]],
    "the last candidate": lambda example: [example.candidates[-1]],
    "the middle": chosen_by(lambda e, c: -abs(at(e, c) - len(e.prompt) / 2)),
}


def enough(name: str, level: Level) -> list[Example]:
    """So many examples, CASES or more, that NEAR is 4 standard deviations of a guess's share."""
    (first,) = examples(name, level, 1)
    chance = 1 / len(first.candidates)
    return examples(name, level, max(CASES, math.ceil(chance * (1 - chance) * (4 / NEAR) ** 2)))


def share_by_chance(given: list[Example]) -> float:
    return sum(1 / len(e.candidates) for e in given) / len(given)


@pytest.mark.parametrize(("name", "number"), slow_but([("mqar", 0), ("icl", 0)], levels()))
def test_reading_finds_every_answer_and_no_shortcut_does(name: str, number: int) -> None:
    level = TASKS[name].levels(LENGTH)[number]
    given = enough(name, level)
    chance = share_by_chance(given)
    for example in given:
        assert len(set(example.candidates)) == len(example.candidates)
        assert example.candidates[example.answer] == oracle(name, example)
    for what, shortcut in SHORTCUTS.items():
        right = 0.0
        for example in given:
            liked = shortcut(example)
            right += (example.candidates[example.answer] in liked) / len(liked)
        share = right / len(given)
        assert share < chance + NEAR, (name, level, what, share, chance)


@pytest.mark.parametrize("name", NAMES)
def test_examples_follow_from_the_seed_alone(name: str) -> None:
    chosen = TASKS[name]
    level = chosen.levels(LENGTH)[1]
    ten = list(chosen.examples(level, 10, 3, count))
    random.seed(99)
    assert list(chosen.examples(level, 4, 3, count)) == ten[:4]
    assert list(chosen.examples(level, 10, 4, count)) != ten
    assert len({example.prompt for example in ten}) == 10


@pytest.mark.parametrize("length", slow_but([255], [127, 255, 1023, 8191]))
@pytest.mark.parametrize("name", NAMES)
def test_levels_fit_into_the_length(name: str, length: int) -> None:
    chosen = TASKS[name]
    found = chosen.fitting(length, count)
    assert found
    assert length < 1000 or len(found) >= 3
    for level in (found[0], found[-1]):
        for example in chosen.examples(level, 20, 1, count):
            longest = max(count(example.prompt + candidate) for candidate in example.candidates)
            assert longest <= length


def test_needles_lie_at_all_depths_and_lengths_are_kept() -> None:
    chosen = TASKS["needle"]
    found = chosen.fitting(4095, count)
    assert len(found) == 5
    for level in found:
        given = list(chosen.examples(level, 200, 0, count))
        assert {example.facts["depth"] for example in given} == {0.0, 0.25, 0.5, 0.75, 1.0}
        for example in given[:10]:
            tokens = count(example.prompt)
            assert int(level["length"]) * 0.9 < tokens <= int(level["length"])


def test_icl_asks_the_same_in_other_orders_and_names() -> None:
    ways = generators.ORDERS * len(generators.LABELS)
    given = examples("icl", {"shots": 16}, 2 * ways)
    for rule in (given[:ways], given[ways:]):
        assert len({last_line(example) for example in rule}) == 1
        assert len({example.answer for example in rule}) == 1
        assert len({example.prompt for example in rule}) == ways
        shots = {
            frozenset(line.split(" ->")[0] for line in example.prompt.splitlines()[:-1])
            for example in rule
        }
        assert len(shots) == 1
    assert last_line(given[0]) != last_line(given[ways])


def test_task_that_does_not_fit_or_has_a_taken_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the task mqar needs \d+ tokens, and the m"):
        TASKS["mqar"].fitting(10, count)

    class Other(Task):
        def levels(self, length: int) -> list[Level]:
            return []

        def example(self, rng: random.Random, level: Level, count: object) -> Example:
            raise NotImplementedError

    with pytest.raises(ConfigError, match="the task mqar is registered twice"):
        task("mqar")(Other)


@pytest.mark.parametrize(
    ("name", "level", "said"),
    [
        ("needle", {"length": 10**9, "needles": 1, "asked": 1}, "needs 1000000000 tokens, and the"),
        ("needle", {"length": "1000000000", "needles": 1, "asked": 1}, "needs 1000000000 tokens"),
        ("icl", {"shots": 10**7}, "needs 10000000 tokens, and the model reads 100000"),
        ("icl", {"shots": 10**5}, "100,000 shots leave no other word that begins with"),
        ("mqar", {"pairs": 10**9}, "needs 1000000000 tokens, and the model reads 100000"),
    ],
)
def test_check_refuses_a_level_without_end(name: str, level: Level, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        TASKS[name].check([level], 100_000, count)


def test_levels_of_refuses_too_many_combinations() -> None:
    assert len(levels_of({"pairs": [*range(10)], "words": [*range(100)]}, "level")) == 1000
    with pytest.raises(ConfigError, match="1,001 are too many; at most 1,000"):
        levels_of({"pairs": [*range(1001)], "words": 3}, "level")


def test_version_is_a_hash_of_own_code_and_empty_for_tasks_of_the_package() -> None:
    class Own(Task):
        def example(self, rng: random.Random, level: Level, count: object) -> Example:
            raise NotImplementedError

    assert len(Own().version) == 16
    assert {task.version for task in TASKS.values()} == {""}
