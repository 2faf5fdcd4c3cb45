"""Use generated examples of a task as a corpus.

Examples for training and examples of `diffllm evaluate` are generated with different seeds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from diffllm.core.errors import ConfigError
from diffllm.core.keys import key
from diffllm.core.registry import schema, source
from diffllm.data.config import DataConfig
from diffllm.data.tasks import TASKS_VERSION
from diffllm.data.tasks.task import AVAILABLE, FORMER, REMOVED_TASKS, TASKS, Level
from diffllm.data.text.corpus import Corpus, Part, TextBatch
from diffllm.data.text.file_index import combined_hash
from diffllm.data.tokenizer import Tokenizer

PART_EXAMPLES = 10_000
LARGEST_SETTING = 2**20
DEFAULT_LENGTH = 256
"""Context length whose easiest level is the default."""


@schema(group="data", name="synthetic")
@dataclass
class SyntheticConfig(DataConfig):
    """Config of a corpus of generated examples; each example is one document."""

    source: str = key(
        "synthetic",
        effect="order",
        fact="corpus",
        help="Kind of the corpus; set by data=.",
    )
    task: str = key(
        "mqar",
        effect="order",
        help="Task of the examples: needle, mqar or icl.",
    )
    level: dict[str, Any] = key(
        {},
        effect="order",
        help="Difficulty, for example {filler: 64}; missing settings have their easiest value.",
    )
    examples: int = key(
        100_000,
        least=1,
        most=10**9,
        effect="order",
        help="Number of documents.",
    )
    answers_only: bool = key(
        True,
        effect="numbers",
        help="Compute the loss only over answers, not over the text before an answer.",
    )
    task_seed: int = key(
        0,
        effect="order",
        help="Seed of the examples.",
    )

    def validate(self) -> None:
        super().validate()
        if self.task not in {*TASKS, *REMOVED_TASKS}:
            raise ConfigError(f"data.task={self.task} is not one of {', '.join(sorted(TASKS))}")
        # Runs of older versions can be read but not resumed.
        has_former_settings = not self.level.keys().isdisjoint(FORMER.get(self.task, ()))
        if self.task in TASKS and not has_former_settings:
            self.check_current()

    def check_current(self) -> None:
        if self.task in REMOVED_TASKS:
            raise ConfigError(f"data.task={self.task} was removed; use {AVAILABLE}")
        setting_names = TASKS[self.task].settings(DEFAULT_LENGTH)
        for name, value in self.level.items():
            if name not in setting_names:
                raise ConfigError(
                    f"data.level: {name}={value} is not a setting of the task {self.task}; its "
                    f"settings are {', '.join(setting_names)}"
                )
            if type(value) is not int or not 0 <= value <= LARGEST_SETTING:
                raise ConfigError(
                    f"data.level: {name}={value} must be a whole number from 0 to "
                    f"{LARGEST_SETTING:,}"
                )


def read_examples(
    cfg: SyntheticConfig, level: Level, number: int, tokenizer: Tokenizer | None
) -> Iterator[TextBatch]:
    examples = min(PART_EXAMPLES, cfg.examples - number * PART_EXAMPLES)
    # Evaluations use a number as seed, so a training example is never an evaluation example.
    seed = f"training/{cfg.task_seed}/{number}"
    count = tokenizer.count if tokenizer else words_of
    for *before, answer in TASKS[cfg.task].documents(level, examples, seed, count):
        if cfg.answers_only:
            yield TextBatch([answer], [before])
        else:
            yield TextBatch([f"{''.join(before)}{answer}"])


def words_of(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@source("synthetic")
def synthetic(cfg: SyntheticConfig, cache_dir: object) -> Corpus:
    """Open a corpus of generated examples of the task `cfg.task`; `cache_dir` is not used.

    Raises ConfigError if the task was removed from diffllm, or if the task cannot generate examples
    of difficulty `cfg.level`.
    """
    cfg.check_current()
    task = TASKS[cfg.task]
    level = {**task.levels(DEFAULT_LENGTH)[0], **cfg.level}
    # One example shows whether the level is possible, before a tokenizer exists.
    try:
        next(iter(task.examples(level, 1, 0, words_of)))
    except (ValueError, IndexError, ArithmeticError) as error:
        raise ConfigError(
            f"data.level={dict(cfg.level)} is not possible for data.task={cfg.task}: {error}"
        ) from error
    settings = [f"{key}={value}" for key, value in sorted(level.items())]
    numbers = [str(cfg.examples), str(cfg.task_seed), str(cfg.answers_only)]

    def parts(tokenizer: Tokenizer | None = None) -> list[Part]:
        parts: list[Part] = []
        for i in range(-(-cfg.examples // PART_EXAMPLES)):
            read = partial(read_examples, cfg, level, i, tokenizer)
            parts.append(Part(f"{cfg.task}, part {i + 1}", 0, read))
        return parts

    return Corpus(
        description=f"{cfg.examples:,} examples of {cfg.task}, {', '.join(settings)}",
        identity=combined_hash(["synthetic", str(TASKS_VERSION), cfg.task, *settings, *numbers]),
        list_parts=parts,
        parts_for=parts,
        has_prompts=cfg.answers_only,
    )
