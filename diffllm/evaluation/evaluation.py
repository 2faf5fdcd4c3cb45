"""An evaluation: a line an example or document about a checkpoint, and the scores of all lines."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diffllm.config import TrainConfig
from diffllm.data import Tokenizer
from diffllm.data.tasks.task import Level
from diffllm.model import Transformer

Line = dict[str, Any]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A checkpoint, opened."""

    model: Transformer
    tokenizer: Tokenizer
    checkpoint: Path
    run: Path
    cfg: TrainConfig

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self.model.tok_embeddings.weight.device


@dataclass(frozen=True)
class Asked:
    """The wishes of whoever evaluates, the same for all evaluations."""

    seed: int = 0
    limit: int | None = None
    """Most examples, or documents, of an evaluation."""
    levels: Mapping[str, Sequence[Level]] = field(default_factory=dict)
    """Levels of tasks, by name, that have to be tried; other tasks choose those that fit."""


@dataclass(frozen=True)
class Score:
    """A number that checkpoints are compared by."""

    of: str
    """Its name within the evaluation: a level, a range of positions, a number of bits."""
    value: float
    interval: tuple[float, float] | None = None
    """95%, over examples or documents of this checkpoint."""
    examples: int = 0
    chance: float | None = None
    """The value of a guess."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further facts, as the same by depth; JSON values."""


class Evaluation(ABC):
    """Measures checkpoints."""

    name: str
    unit: str
    """The unit of its scores, as "nats a token"."""

    @abstractmethod
    def settings(self, subject: Subject, asked: Asked) -> Settings:
        """Return all that lines depend on beside the checkpoint and its tokenizer, as JSON values;
        raises ConfigError for what this checkpoint cannot be asked."""

    @abstractmethod
    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        """Measure; return a line of JSON values for each example or document."""

    @abstractmethod
    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[Score]:
        """Sum the lines up."""
