"""Base class of evaluations of a checkpoint, and the files that store the results.

A results file is a JSON Lines file in a run directory. Its first line contains "key" (all settings
that the result depends on), "unit" (the unit of the scores), "scores" and "sha256". The checksum
"sha256" detects changed files. "examples_file" names the file of a user's task. Each further line
describes one example, document or layer.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.files import parse_json, read_lines, readable, write_atomic
from diffllm.core.printing import to_stderr
from diffllm.core.run_files import RunFolder, step_name, step_of

if TYPE_CHECKING:
    import torch

    from diffllm.config import TrainConfig
    from diffllm.data.tasks.task import ExamplesFile, Level
    from diffllm.data.tokenizer import Tokenizer
    from diffllm.model import Transformer

SHARE = "share of right answers"
"""The unit of tasks."""
LARGEST_SCORE = 1e150
"""Limit of the magnitude of scores, because the report sums squares of scores."""
Line = dict[str, Any]
Lines = Mapping[str, Line]
"""Scores of a run by name, or results of a checkpoint by evaluation."""
Settings = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A loaded checkpoint to evaluate, with its run directory and config."""

    model: Transformer
    tokenizer: Tokenizer
    checkpoint: Path
    run: Path
    cfg: TrainConfig

    @property
    def device(self) -> torch.device:
        return self.model.tok_embeddings.weight.device


@dataclass(frozen=True)
class EvaluationOptions:
    """Options that the user sets for all evaluations."""

    seed: int = 0
    limit: int | None = None
    """Maximum number of examples, documents or sequences of an evaluation."""
    levels: Mapping[str, Sequence[Level]] = field(default_factory=dict)
    """Levels of difficulty by name of the task; other tasks use all levels that fit."""
    seq_len: int | None = None
    """Maximum length of the evaluation `position` in tokens; None: the length of the model."""


@dataclass(frozen=True)
class NamedScore:
    """A score of an evaluation.

    Attributes:
        of: name of the score, such as "target" or a level of difficulty.
        interval: 95% confidence interval of `value`; None if not estimated.
        examples: number of scored examples, documents or sequences.
        chance: expected score of random guesses; None if not defined.
        more: further fields for the results file.
    """

    of: str
    value: float
    interval: tuple[float, float] | None = None
    examples: int = 0
    chance: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


class Evaluation(ABC):
    """Base class of evaluations of a checkpoint.

    `name` identifies the evaluation in commands and file names. `unit` is the unit of all scores.
    `examples_file` is set for a user's file of examples; other evaluations have unique names.
    """

    name: str
    unit: str
    examples_file: ExamplesFile | None = None

    @abstractmethod
    def settings(self, subject: Subject, options: EvaluationOptions) -> Settings:
        """Return all settings that determine the result, except the checkpoint and the tokenizer.

        All values are JSON values. Raises ConfigError if this evaluation cannot measure the
        checkpoint.
        """

    @abstractmethod
    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        """Run the model, and return one JSON object per example, document or layer."""

    @abstractmethod
    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[NamedScore]:
        """Compute the scores from the JSON objects that the method `lines` returned."""


def results_of(run: Path, step: int) -> Path:
    """Return the directory with the results files of the checkpoint at `step`."""
    return run / RunFolder.EVALUATION / step_name(step)


def read_result(file: Path, key: Mapping[str, Any]) -> Line | None:
    """Read the first line of a results file as a dict.

    Return None if the file is missing or damaged, or if its entry "key" does not equal `key`.
    """
    try:
        with readable(file):
            first = read_first(file)
    except CheckpointError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            to_stderr(f"{error}; evaluating again")
        return None
    return first if first["key"] == key else None


def check_examples_file(file: Path, examples_file: ExamplesFile | None) -> None:
    """Raise ConfigError if a results file stores the results of another file of examples.

    Results of an edited file, and of an equal file at another path, can be overwritten. Older
    versions did not store the path.
    """
    try:
        stored = read_first(file).get("examples_file")
    except (OSError, ValueError):
        return  # missing or damaged: `read_result` explains
    if examples_file is None or not isinstance(stored, dict):
        return
    if stored.get("path") != examples_file.path and stored.get("sha256") != examples_file.sha256:
        raise ConfigError(
            f"tasks: {examples_file.path} has the name of {stored.get('path')}, whose results "
            f"would be overwritten; rename the file, or delete {file}"
        )


def store_result(file: Path, first: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """Write a results file: the line `first`, with a checksum added, and then `lines`.

    Raises CheckpointError if writing fails.
    """
    texts = [f"{json.dumps(line)}\n" for line in lines]
    head = json.dumps({**first, "sha256": checksum(first, texts)})
    write_atomic(file, "".join([f"{head}\n", *texts]), new_parents=2)


def checksum(first: Mapping[str, Any], lines: Iterable[str]) -> str:
    """Return the SHA-256 of a results file with the first line `first` and the further `lines`.

    The entry "sha256" of the first line counts as null.
    """
    digest = hashlib.sha256(json.dumps({**first, "sha256": None}).encode())
    for line in lines:
        digest.update(line.encode())
    return digest.hexdigest()


def all_results(run: Path, problems: dict[str, list[str]], step: int = 0) -> dict[int, Lines]:
    """Read the first line of each results file of a run.

    Returns a nested dict with the first lines as values: {step: {name of the evaluation: line}}.
    Skip unreadable or invalid files.

    Args:
        problems: dict to which the skipped files are added, as {error message: paths}.
        step: step of the checkpoint whose results are read; 0 selects all checkpoints.
    """
    results: dict[int, dict[str, Line]] = {}
    step_pattern = f"{step:08d}" if step else "[0-9]" * 8
    for file in sorted((run / RunFolder.EVALUATION).glob(f"step-{step_pattern}/*.jsonl")):
        file_step = step_of(file.parent)
        try:
            results.setdefault(file_step, {})[file.stem] = read_first(file)
        except (OSError, ValueError) as error:
            reason = f"{getattr(error, 'strerror', error)}; skipped"
            problems.setdefault(reason, []).append(str(file))
    return dict(results)


def question_of(result: Line) -> Line:
    """Return the documents, settings and corpus of an evaluation, without its checkpoint."""
    return {name: value for name, value in result["key"].items() if name != "checkpoint"}


def read_first(file: Path) -> Line:
    """Read the first line of a results file, and check its fields and the checksum of the file.

    Raises OSError if the file cannot be read, and ValueError if its content is invalid.
    """
    lines = read_lines(file)
    first = parse_json(next(lines, ""))
    if not isinstance(first, dict) or not isinstance(first.get("key"), dict):
        raise ValueError("is not a result of an evaluation")
    scores = first.get("scores")
    if not isinstance(first.get("unit"), str) or not isinstance(scores, list):
        raise ValueError("has no unit or no scores")
    if not all(map(is_score, scores)):
        raise ValueError("has a score with a field of the wrong type")
    if first.get("sha256") != checksum(first, lines):
        raise ValueError("was changed after it was written: its checksum differs")
    return first


def is_score(score: Any) -> bool:
    """Return whether a JSON value is a dict whose fields have the types of `NamedScore`."""
    if not isinstance(score, dict) or not isinstance(score.get("of"), str) or "value" not in score:
        return False
    if not isinstance(score.get("level", {}), dict):
        return False
    keys = ("value", "chance", "generated", "examples", "independent")
    numbers = [score.get(key) for key in keys]
    for key in ("interval", "range"):
        pair = score.get(key) or [None, None]
        if not isinstance(pair, list) or len(pair) != 2:
            return False
        numbers += pair
    for key, group in score.items():
        if key.startswith("by_"):
            if not isinstance(group, dict):
                return False
            numbers += group.values()
    return all(number is None or is_small_number(number) for number in numbers)


def is_small_number(value: Any) -> bool:
    # The exact type excludes bool, which is a subclass of int.
    return type(value) in (int, float) and abs(value) < LARGEST_SCORE
