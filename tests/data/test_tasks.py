"""Generated tasks: the text determines one right answer, which no shortcut finds."""

import math
import random
import re
from collections import Counter
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
    """Count tokens of a tokenizer with words after a space, digits and signs as pieces."""
    return len(re.findall(r" ?[A-Za-z]+| ?\d|\W", text))


def levels() -> list[tuple[str, int]]:
    """List task and index of every level of the suite for a context of LENGTH tokens."""
    return [(name, i) for name in NAMES for i in range(len(TASKS[name].fitting(LENGTH, count)))]


def task_examples(name: str, level: Level, number: int) -> list[Example]:
    return list(TASKS[name].examples(level, number, 0, count))


def told_pairs(example: Example) -> list[tuple[str, str]]:
    """Return the pairs of key and value at the start of an mqar example."""
    words = example.prompt.split()
    pairs = zip(words[::2], words[1::2], strict=False)
    return [pair for pair, _ in zip(pairs, range(example.facts["pairs"]), strict=False)]


def oracle(name: str, example: Example) -> str:
    """Return the right answer by the rules of the task."""
    words = example.prompt.split()
    if name == "mqar":
        return " " + dict(told_pairs(example))[words[-1]]
    if name == "needle":
        told = dict(re.findall(r"The magic number of (\w+) is (\d+)\.", example.prompt))
        (asked,) = re.findall(r"The magic number of (\w+) is$", example.prompt)
        return " " + told[asked]
    rules = {word[0]: label for word, label in zip(words[:-2:3], words[2:-2:3], strict=True)}
    return " " + rules[words[-2][0]]


def at(example: Example, candidate: str) -> int:
    """Return the place of the last occurrence of a candidate in the prompt."""
    pattern = rf"\b{re.escape(candidate.strip())}\b"
    return max(match.start() for match in re.finditer(pattern, example.prompt))


def chosen_by(best: Callable[[Example, str], float]) -> Callable[[Example], list[str]]:
    """Return a function that selects the candidates with the highest score, including ties."""

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
    "the first of the alphabet": lambda example: [min(example.candidates)],
    "the last of the alphabet": lambda example: [max(example.candidates)],
    "the first candidate": lambda example: [example.candidates[0]],
    "the last candidate": lambda example: [example.candidates[-1]],
    "the middle": chosen_by(lambda e, c: -abs(at(e, c) - len(e.prompt) / 2)),
}


def enough(name: str, level: Level) -> list[Example]:
    """Return at least CASES examples, so that NEAR is 4 standard deviations of a guess's share."""
    chance = share_by_chance(task_examples(name, level, 4))
    cases = math.ceil(chance * (1 - chance) * (4 / NEAR) ** 2)
    return task_examples(name, level, max(CASES, cases))


def share_by_chance(given: list[Example]) -> float:
    return sum(1 / len(e.candidates) for e in given) / len(given)


@pytest.mark.parametrize(("name", "number"), slow_but([("mqar", 0), ("icl", 0)], levels()))
def test_task_examples_cannot_be_solved_by_known_shortcuts(name, number):
    level = TASKS[name].levels(LENGTH)[number]
    given = enough(name, level)
    chance = share_by_chance(given)
    for example in given:
        assert len(set(example.candidates)) == len(example.candidates)
        assert example.candidates[example.answer] == oracle(name, example)
        # Equal frequencies: answers to earlier queries cannot be eliminated.
        assert len({frequency(example, candidate) for candidate in example.candidates}) == 1
    for what, shortcut in SHORTCUTS.items():
        right = 0.0
        for example in given:
            liked = shortcut(example)
            right += (example.candidates[example.answer] in liked) / len(liked)
        share = right / len(given)
        assert share < chance + NEAR, (name, level, what, share, chance)


@pytest.mark.parametrize("name", NAMES)
def test_task_examples_depend_only_on_seed_and_index(name):
    chosen = TASKS[name]
    level = chosen.levels(LENGTH)[1]
    ten = list(chosen.examples(level, 10, 3, count))
    random.seed(99)
    assert list(chosen.examples(level, 4, 3, count)) == ten[:4]
    assert list(chosen.examples(level, 10, 4, count)) != ten
    assert len({example.prompt for example in ten}) == 10


@pytest.mark.parametrize("length", slow_but([511], [511, 1023, 8191]))
@pytest.mark.parametrize("name", NAMES)
def test_examples_of_selected_levels_do_not_exceed_context_length(name, length):
    chosen = TASKS[name]
    found = chosen.fitting(length, count)
    assert found
    assert length < 8000 or len(found) >= 5
    for level in (found[0], found[-1]):
        for example in chosen.examples(level, 20, 1, count):
            longest = max(count(example.prompt + candidate) for candidate in example.candidates)
            assert longest <= length


def test_mqar_examples_use_separate_words_for_keys_values_and_filler():
    given = task_examples("mqar", {"filler": 64}, 200)
    assert Counter(example.facts["pairs"] for example in given) == dict.fromkeys((2, 4, 8, 16), 50)
    for example in given:
        pairs, words = told_pairs(example), example.prompt.split()
        keys, values = ({*kind} for kind in zip(*pairs, strict=True))
        queries = words[2 * len(pairs) + 64 :]
        assert len(keys) == len(values) == len(pairs)
        assert keys <= {*generators.KEY_WORDS}
        assert values <= {*generators.VALUES}
        assert {*words[2 * len(pairs) :][:64]} <= {*generators.FILLER}
        assert count(example.prompt) == len(words)
        assert len(queries) == 2 * min(4, len(pairs) // 2) - 1
        assert len({*queries[::2]}) == len(queries[::2])
    kinds = (generators.KEY_WORDS, generators.VALUES, generators.FILLER)
    assert len({word for kind in kinds for word in kind}) == sum(map(len, kinds))


def test_mqar_uses_only_single_token_words_if_enough_such_words_exist():
    def pieces(text: str) -> int:
        return len(re.findall(r" \w{1,5}|\w{1,5}", text))

    keys, values, _ = generators.vocabulary(pieces)
    assert keys == tuple(word for word in generators.KEY_WORDS if len(word) <= 5)
    assert 16 <= len(keys) < len(generators.KEY_WORDS)
    assert all(len(word) <= 5 for word in values)
    every = (generators.KEY_WORDS, generators.VALUES, generators.FILLER)
    assert generators.vocabulary(lambda text: len(text)) == every


def test_needle_examples_have_expected_length_and_uniform_depth():
    chosen = TASKS["needle"]
    found = chosen.fitting(4095, count)
    assert [level["length"] for level in found] == [512, 1024, 2048, 4096]
    assert chosen.number(found[0]) == 250
    for level in found:
        given = list(chosen.examples(level, 250 if level == found[0] else 5, 0, count))
        depths = Counter(example.facts["depth"] for example in given)
        assert depths == dict.fromkeys((0, 0.25, 0.5, 0.75, 1), len(given) // 5)
        for example in given:
            length = count(example.prompt + example.candidates[example.answer])
            assert int(level["length"]) - 30 < length < int(level["length"])
            assert example.evidence is not None
            start, end = example.evidence
            before, after = example.prompt[:start], example.prompt[end:]
            straws = [len(re.findall(r"[a-z]\.", text)) for text in (before, after)]
            assert sum(straws) >= 20
            assert abs(straws[0] - example.facts["depth"] * sum(straws)) <= 0.5


@pytest.mark.parametrize("name", ["mqar", "needle"])
def test_evidence_of_task_example_equals_text_that_states_the_answer(name):
    for example in task_examples(name, TASKS[name].levels(LENGTH)[1], 40):
        assert example.evidence is not None
        told = example.prompt[slice(*example.evidence)]
        answer = example.candidates[example.answer]
        asked = re.split(r"\W+", example.prompt)[-1 if name == "mqar" else -2]
        expected = "{}{}" if name == "mqar" else "The magic number of {} is{}."
        assert told == expected.format(asked, answer)


def test_icl_examples_contain_each_rule_in_four_different_orders():
    chosen = TASKS["icl"]
    level = {"shots": 16}
    assert chosen.number(level) == 200
    given = task_examples("icl", level, 200)
    texts = {rule: [e for e in given if e.facts["rule"] == rule] for rule in range(50)}
    for own in texts.values():
        assert len({example.prompt for example in own}) == len(own) == 4
        assert {example.facts["order"] for example in own} == {0, 1, 2, 3}
        assert len({example.facts["labels"] for example in own}) == 4
        assert len({frozenset(example.prompt.split()[::3]) for example in own}) == 1
        assert len({example.prompt.split()[-2] for example in own}) == 1
    assert len({example.prompt.split()[-2] for example in given}) > 40
    for fact in ("order", "labels"):
        of_fact = Counter((example.facts[fact], example.answer) for example in given)
        assert {*of_fact.values()} == {25}
    assert [example.facts["rule"] for example in given[:50]] == [*range(50)]


def test_icl_training_documents_use_the_labels_of_icl_examples():
    documents = list(TASKS["icl"].documents({"shots": 8}, 100, "training", count))
    labels = {label for pieces in documents for label in pieces[1::2]}
    assert labels == {
        c for example in task_examples("icl", {"shots": 8}, 200) for c in example.candidates
    }
    for pieces in documents:
        words = "".join(pieces).split()
        label_of: dict[str, str] = {}
        expected = []
        for word, label in zip(words[::3], words[2::3], strict=True):
            expected += [f" {label}"] * (word[0] in label_of)
            assert label_of.setdefault(word[0], label) == label
        assert [*pieces[1::2]] == expected
        assert word[0] in label_of


def test_too_long_or_duplicate_task_raises_config_error():
    with pytest.raises(ConfigError, match=r"the task mqar needs \d+ tokens, but the m"):
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
        ("needle", {"length": 10**9, "needles": 1, "queries": 1}, "needs 1000000000 tokens, but"),
        ("needle", {"length": "1000000000", "needles": 1, "queries": 1}, "needs 1000000000 tokens"),
        ("needle", {"length": 150, "needles": 6, "queries": 2}, "sentences of hay fit; at least"),
        (
            "needle",
            {"length": 512, "needles": 2, "queries": 3},
            "queries=3 must be between 1 and needles=2",
        ),
        (
            "needle",
            {"length": 512, "needles": 6, "asked": 2},
            "must have exactly the settings length, needles, queries of the task needle",
        ),
        ("icl", {"shots": 10**7}, "needs 10000000 tokens, but the model reads 100000"),
        ("icl", {"shots": 10**5}, "100,000 shots leave no other word that begins with"),
        ("mqar", {"filler": 10**9}, "needs 1000000000 tokens, but the model reads 100000"),
    ],
)
def test_task_refuses_invalid_or_too_long_levels(name, level, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        TASKS[name].check([level], 100_000, count)


def test_more_than_1000_task_levels_are_refused():
    assert len(levels_of({"needles": [*range(10)], "length": [*range(100)]}, "level")) == 1000
    with pytest.raises(ConfigError, match="is 1,001; the maximum is 1,000"):
        levels_of({"needles": [*range(1001)], "length": 3}, "level")


def test_only_user_tasks_have_a_code_hash_as_version():
    class Own(Task):
        def example(self, rng: random.Random, level: Level, count: object) -> Example:
            raise NotImplementedError

    assert len(Own().version) == 16
    assert {task.version for task in TASKS.values()} == {""}
