"""Tasks of one's own: a JSON Lines file of prompts and answers."""

import hashlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.files import parse_json, read_bytes, readable
from diffllm.data.tasks.task import Count, Example, Level, Seed, Task

LARGEST = 2**28
"""Bytes of a file."""


class OwnFile(Task):
    """Each line is an example: {"prompt": ..., "answer": ...}, and, where the model is to choose,
    "candidates", a list with the answer in it; "level" may be an object of settings, by which
    results are told apart. Without candidates an answer is right if the model would generate it.

    Raises ConfigError, which names the line, for a file that is none of these.
    """

    def __init__(self, path: Path):
        self.name, self.path = path.stem, path
        try:
            with readable(path):
                content = read_bytes(path, LARGEST, follow=True)
        except CheckpointError as error:
            raise ConfigError(f"tasks: {error}") from None
        self.hash = hashlib.sha256(content).hexdigest()
        self.by_level: dict[str, tuple[Level, list[Example]]] = {}
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                level, example = self.parsed(line, number)
                key = repr(sorted(level.items()))
                self.by_level.setdefault(key, (level, []))[1].append(example)
        if not self.by_level:
            raise ConfigError(f"tasks: {path} has no examples")

    @property
    def version(self) -> str:
        return self.hash

    def parsed(self, line: bytes, number: int) -> tuple[Level, Example]:
        """Read a line."""
        try:
            content: dict[str, Any] = parse_json(line.decode())
            if not isinstance(content, dict):
                raise ValueError("it is not an object")
            prompt, answer = text_of(content, "prompt"), text_of(content, "answer")
            candidates = content.get("candidates", [answer])
            if not isinstance(candidates, list) or not all(
                isinstance(each, str) and each for each in candidates
            ):
                raise ValueError("candidates are no list of texts")
            if answer not in candidates or len(set(candidates)) < len(candidates):
                raise ValueError("candidates have to differ, and the answer has to be one of them")
            level = content.get("level", {})
            if not isinstance(level, dict) or not all(
                isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
                for value in level.values()
            ):
                raise ValueError("level is no object of finite numbers and texts")
        except ValueError as error:
            raise ConfigError(f"tasks: {self.path}, line {number}: {error}") from None
        return level, Example(prompt, tuple(candidates), candidates.index(answer))

    def levels(self, length: int) -> list[Level]:
        return [level for level, _ in self.by_level.values()]

    def number(self, level: Level) -> int:
        return len(self.of_level(level))

    def of_level(self, level: Level) -> list[Example]:
        return self.by_level[repr(sorted(level.items()))][1]

    def example(self, rng: random.Random, level: Level, count: Count) -> Example:
        return rng.choice(self.of_level(level))

    def examples(self, level: Level, number: int, seed: Seed, count: Count) -> Iterator[Example]:
        yield from self.of_level(level)[:number]

    def longest(self, level: Level, count: Count) -> int:
        """Return the tokens of the shortest example: those that do not fit are left out."""
        own = self.of_level(level)
        return min(count(example.prompt + example.candidates[0]) for example in own)


def text_of(content: dict[str, Any], key: str) -> str:
    """Return a text of a line; raises ValueError."""
    if key not in content:
        raise ValueError(f"it has no {key}")
    if not isinstance(content[key], str) or not content[key]:
        raise ValueError(f"{key} is no text")
    return str(content[key])
