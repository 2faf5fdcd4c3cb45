"""Base class and registry of tasks; each example of a task has exactly one right answer.

A level is a dict of settings that determines the difficulty of examples, such as {"filler": 64}.
"""

import codecs
import hashlib
import inspect
import math
import os
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from diffllm.core.bounds import at_most
from diffllm.core.errors import ConfigError
from diffllm.core.files import parse_json, read_bytes, similar_path
from diffllm.core.typed import made

Level = Mapping[str, int | float | str]
"""Settings of difficulty."""
Count = Callable[[str], int]
Seed = int | str
MEASURED_EXAMPLES = 4
SPARE = 1.03
"""Assumed ratio of the longest example to the longest measured example."""
MOST_CANDIDATES = 16
MOST_LEVELS = 1000
LARGEST_TASK_FILE = 2**28


class DoesNotFit(ConfigError):
    """Raised if the examples of a task exceed the context length of a model."""


@dataclass(frozen=True)
class Example:
    """A prompt with candidate continuations, of which exactly one is right.

    Attributes:
        candidates: distinct continuations; either all or none begin with a space.
        answer: index of the right candidate.
        facts: properties of the example, such as {"pairs": 8}; results can be grouped by them.
        evidence: prompt characters [start, end) that state the answer; None if unknown.
    """

    prompt: str
    candidates: tuple[str, ...]
    answer: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[int, int] | None = None


def levels_of(settings: Any, key: str) -> list[Level]:
    """Return one level for each combination of the values in `settings`.

    For example, {"filler": [0, 64]} gives the levels {"filler": 0} and {"filler": 64}. `key`
    is the name of the settings in error messages. Raises ConfigError for invalid settings or more
    than 1000 combinations.
    """
    # A single None is no valid value, so it raises the error below.
    axes = settings.values() if isinstance(settings, Mapping) else [None]
    values_by_axis = []
    for axis in axes:
        values = axis if isinstance(axis, list) else [axis]
        has_valid_types = all(isinstance(value, int | float | str) for value in values)
        if not values or not has_valid_types:
            raise ConfigError(
                f"{key} must be a mapping such as {{filler: 64}} or {{filler: [0, 64]}}"
            )
        values_by_axis.append(values)
    # Before the levels are listed: a few long lists have billions of combinations.
    combinations = prod(map(len, values_by_axis))
    at_most(f"combinations of {key}", combinations, MOST_LEVELS)
    levels: list[Level] = []
    for combination in product(*values_by_axis):
        levels.append(dict(zip(settings, combination, strict=True)))
    return levels


class ExamplesFile(NamedTuple):
    """File of examples: its path, with links resolved, and the SHA-256 of its content."""

    path: str
    sha256: str


class Task(ABC):
    """Base class of tasks, which generate examples; the decorator `@task` registers a subclass.

    The result of `example` may depend only on its arguments.

    Attributes:
        by: keys of `Example.facts`; accuracy is also reported for each value of these facts.
        sizes: maps each setting of a level to its values in ascending order. The value of a
            setting is a number of items per example, such as filler words. Each item must have at
            least one token.
        cluster: key of `Example.facts`; examples with the same value of this fact are dependent.
            An empty string means that all examples are independent.
        examples_file: the file that contains the examples; None if they are generated.
    """

    name: str
    by: ClassVar[tuple[str, ...]] = ()
    sizes: ClassVar[Mapping[str, Sequence[int]]] = {}
    cluster: ClassVar[str] = ""
    examples_file: ExamplesFile | None = None

    @cached_property
    def version(self) -> str:
        """Return a hash of the task's source file; a changed hash invalidates stored results.

        Return an empty string if the source is unavailable. Built-in tasks also return an empty
        string, because they share the version TASKS_VERSION.
        """
        module = type(self).__module__
        if module.partition(".")[0] == "diffllm":
            return ""
        try:
            source = inspect.getsource(sys.modules[module])
        except OSError:
            return ""
        return hashlib.sha256(source.encode()).hexdigest()[:16]

    def settings(self, length: int) -> tuple[str, ...]:
        """Return the setting names of the levels for a context of `length` tokens."""
        levels = self.levels(length)
        # A task may have no level for a short context.
        if not levels:
            levels = self.levels(4096)
        return tuple(levels[0])

    def number(self, level: Level) -> int | None:
        """Return the default number of examples of `level`; None means the general default."""
        return None

    def levels(self, length: int) -> list[Level]:
        """List the levels of difficulty for a context of `length` tokens, easiest first."""
        levels: list[Level] = []
        for combination in product(*self.sizes.values()):
            levels.append(dict(zip(self.sizes, combination, strict=True)))
        return levels

    @abstractmethod
    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        """Generate one example of difficulty `level`, with `rng` as the only source of randomness.

        `count` returns the number of tokens of a text; tasks may use it to limit the prompt length.
        """

    def document(self, rng: random.Random, level: Level, count: Count) -> tuple[str, ...]:
        """Generate a training text as strings; by default, an example's prompt and right answer.

        The first string is context, the second is predicted text, and so on in turn. The loss
        applies only to predicted text.
        """
        example = self.example(rng, level, count)
        return example.prompt, example.candidates[example.answer]

    def fitting(self, length: int, count: Count) -> list[Level]:
        """List the levels whose examples have at most `length` tokens, easiest first.

        `count` returns the number of tokens of a text. Raises DoesNotFit if no level fits.
        """
        levels: list[Level] = []
        sizes: list[int] = []
        for level in self.levels(length):
            try:
                size = self.longest(level, count)
            except ValueError:
                # The level is impossible with this tokenizer.
                continue
            sizes.append(size)
            if size <= length:
                levels.append(level)
            elif size > 4 * length:
                # Later levels are even longer, and slow to generate.
                break
        if not levels:
            needs = f"{min(sizes)} tokens" if sizes else "more tokens"
            raise DoesNotFit(f"the task {self.name} needs {needs}, but the model reads {length}")
        return levels

    def check(self, levels: Sequence[Level], length: int, count: Count) -> None:
        """Check that `levels` are valid for the task, and that examples fit into `length` tokens.

        `count` returns the number of tokens of a text. Raises ConfigError for an invalid level, and
        DoesNotFit if the examples of a level are longer than `length` tokens.
        """
        names = self.settings(length)
        for level in levels:
            if level.keys() != set(names):
                raise ConfigError(
                    f"level={dict(level)} must have exactly the settings {', '.join(names)} of the "
                    f"task {self.name}"
                )
            try:
                size = max((int(level[key]) for key in self.sizes), default=0)
                # Reject a huge size before generating examples of that size.
                tokens = size if size > 2 * length else self.longest(level, count)
            except (ValueError, IndexError, TypeError, ArithmeticError) as error:
                raise ConfigError(
                    f"level={dict(level)} is not possible for the task {self.name}: {error}"
                ) from error
            if tokens > length:
                raise DoesNotFit(
                    f"the task {self.name} at {dict(level)} needs {tokens} tokens, but the model "
                    f"reads {length}"
                )

    def longest(self, level: Level, count: Count) -> int:
        """Estimate the number of tokens of the longest example of a level, including the answer.

        The estimate uses four examples. `count` returns the number of tokens of a text.
        """
        sizes = []
        for example in self.examples(level, MEASURED_EXAMPLES, 0, count):
            answer_size = max(map(count, example.candidates))
            sizes.append(count(example.prompt) + answer_size)
        return round(SPARE * max(sizes))

    def examples(self, level: Level, number: int, seed: Seed, count: Count) -> Iterator[Example]:
        """Generate `number` examples; example i depends only on the task, `level`, `seed` and i."""
        for i in range(number):
            rng = self.generator(level, seed, i)
            yield self.example(rng, level, count)

    def documents(
        self, level: Level, number: int, seed: Seed, count: Count
    ) -> Iterator[tuple[str, ...]]:
        for i in range(number):
            rng = self.generator(level, seed, i)
            yield self.document(rng, level, count)

    def generator(self, level: Level, seed: Seed, place: int) -> random.Random:
        # Sorted, because the order of the settings in a config must not change the examples.
        settings = ",".join(f"{key}={value}" for key, value in sorted(level.items()))
        return random.Random(f"{self.name}/{settings}/{seed}/{place}")


TASKS: dict[str, Task] = {}
REMOVED_TASKS = ("induction", "noisy_kv", "phonebook")
AVAILABLE = "needle, mqar, icl or a task of your own (docs/evaluation.md)"
FORMER = {"mqar": ("pairs", "words"), "needle": ("asked", "words")}
"""Settings of tasks in earlier versions, which configs of old runs may contain."""
T = TypeVar("T", bound=type[Task])


def task(name: str, **sizes: Sequence[int]) -> Callable[[T], T]:
    """Return a class decorator that registers a subclass of `Task` under `name`.

    `sizes` maps each setting of the levels to its values in ascending order, such as
    filler=(0, 64). The decorator raises ConfigError if another task has the same name.
    """

    def register(cls: T) -> T:
        registered = TASKS.get(name)
        # A notebook or a test may define the same class again.
        if registered is not None and type(registered).__qualname__ != cls.__qualname__:
            raise ConfigError(f"the task {name} is registered twice; rename one of the two tasks")
        cls.name = name
        cls.sizes = sizes
        TASKS[name] = cls()
        return cls

    return register


def shuffled_candidates(rng: random.Random, right: str, others: list[str]) -> tuple[Any, int]:
    """Shuffle `right` with at most 15 random `others`; return (candidates, index of `right`)."""
    number = min(len(others), MOST_CANDIDATES - 1)
    candidates = [right, *rng.sample(others, number)]
    rng.shuffle(candidates)
    return tuple(candidates), candidates.index(right)


@dataclass(frozen=True)
class ExampleLine:
    prompt: str
    answer: str
    candidates: list[str] | None = None


class OwnFile(Task):
    """Task that reads its examples from a user's file, one JSON object per line.

    An object has the keys "prompt" and "answer". The optional key "candidates" lists continuations,
    including the answer. Without candidates, a model is right if it generates the answer. The
    optional key "level" is an object of settings; results are reported per level.

    The constructor raises ConfigError for an invalid line and names the line number.
    """

    def __init__(self, path: Path):
        self.name = path.stem
        try:
            content = read_bytes(path, LARGEST_TASK_FILE, follow=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            near = similar_path(path, os.path.isfile)
            raise ConfigError(f"tasks: {path} cannot be read: {reason}{near}") from None
        self.version = hashlib.sha256(content).hexdigest()
        self.examples_file = ExamplesFile(str(path.resolve()), self.version)
        self.by_level: dict[str, tuple[Level, list[Example]]] = {}
        lines = content.removeprefix(codecs.BOM_UTF8).splitlines()
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                level, example = example_in(line)
            except ValueError as error:
                raise ConfigError(f"tasks: {path}, line {number}: {error}") from None
            _, examples = self.by_level.setdefault(key_of(level), (level, []))
            examples.append(example)
        if not self.by_level:
            raise ConfigError(
                f"tasks: {path} is empty; each line must be an object with prompt and answer"
            )

    def levels(self, length: int) -> list[Level]:
        return [level for level, _ in self.by_level.values()]

    def number(self, level: Level) -> int:
        return len(self.of_level(level))

    def of_level(self, level: Level) -> list[Example]:
        _, examples = self.by_level[key_of(level)]
        return examples

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        return rng.choice(self.of_level(level))

    def examples(self, level: Level, number: int, seed: Seed, count: Count) -> Iterator[Example]:
        yield from self.of_level(level)[:number]

    def longest(self, level: Level, count: Count) -> int:
        # The shortest example, because an evaluation may skip longer examples.
        examples = self.of_level(level)
        return min(count(example.prompt + example.candidates[0]) for example in examples)


def key_of(level: Level) -> str:
    # Sorted, because two lines of a file may name the same settings in different orders.
    return repr(sorted(level.items()))


def example_in(line: bytes) -> tuple[Level, Example]:
    content = parse_json(line.decode())
    stored = made(ExampleLine, content)
    candidates = stored.candidates
    if candidates is None:
        candidates = [stored.answer]
    if not stored.prompt or not all(candidates):
        raise ValueError("prompt, answer and candidates must not be empty")
    has_duplicates = len(set(candidates)) < len(candidates)
    if stored.answer not in candidates or has_duplicates:
        raise ValueError("candidates must differ, and answer must be one of them")
    level = content.get("level", {})
    if not isinstance(level, dict) or not all(map(is_setting, level.values())):
        raise ValueError("level must map names to finite numbers and texts")
    answer = candidates.index(stored.answer)
    return level, Example(stored.prompt, tuple(candidates), answer)


def is_setting(value: Any) -> bool:
    """Return whether a JSON value is a text or a finite number."""
    if isinstance(value, str):
        return True
    return isinstance(value, int | float) and math.isfinite(value)
