"""Evaluation of a model's answers to the examples of a task.

The answer is chosen by log-likelihood or by greedy decoding.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diffllm.core.console import track
from diffllm.core.errors import ConfigError
from diffllm.data.tasks import TASKS_VERSION
from diffllm.data.tasks.task import Example, Task
from diffllm.data.tokenizer import Tokenizer
from diffllm.evaluation.evaluation import (
    SHARE,
    Evaluation,
    EvaluationOptions,
    Line,
    NamedScore,
    Settings,
    Subject,
)
from diffllm.evaluation.scoring import Question, Scored, score, spelt_question
from diffllm.statistics.estimates import wilson

EXAMPLES_PER_LEVEL = 50
"""Examples per level, unless the task or a limit sets another number."""
SCORES_VERSION = 2
"""Part of the key of results: increase it when scores change."""


class Answers(Evaluation):
    """Measures the share of a task's examples that the model answers correctly.

    If an example has several candidates, the model's answer is the candidate with the highest
    log-likelihood. If an example has a single candidate, the model's answer is the greedy
    continuation of the prompt.
    """

    unit = SHARE

    def __init__(self, task: Task):
        self.task = task
        self.name = task.name
        self.examples_file = task.examples_file

    def settings(self, subject: Subject, options: EvaluationOptions) -> Settings:
        version = [TASKS_VERSION, SCORES_VERSION, self.task.version]
        examples = self.examples(options, subject.tokenizer, subject.cfg.seq_len)
        return {"version": version, **examples}

    def examples(self, options: EvaluationOptions, tokenizer: Tokenizer, seq_len: int) -> Settings:
        """Return the seed, the difficulty levels, and the number of examples of each level.

        If `options` contains levels of this task, use these levels. Otherwise use all levels whose
        examples have at most `seq_len` tokens.

        Raises DoesNotFit if the examples of a level in `options` have more than `seq_len` tokens,
        or if no level can be used.
        """
        levels = list(options.levels.get(self.name, ()))
        count = tokenizer.count
        length = seq_len - 1  # An EOS or a BOS precedes the text.
        if levels:
            self.task.check(levels, length, count)
        else:
            levels = self.task.fitting(length, count)
        numbers = []
        for level in levels:
            number = self.task.number(level)
            numbers.append(EXAMPLES_PER_LEVEL if number is None else number)
        if options.limit is not None:
            # Divide the limit evenly between the levels; the first levels share the remainder.
            quotient, remainder = divmod(options.limit, len(levels))
            for i, number in enumerate(numbers):
                most = quotient + 1 if i < remainder else quotient
                numbers[i] = min(number, most)
        return {"seed": options.seed, "examples": numbers, "levels": list(map(dict, levels))}

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        examples = questions(self.task, settings, subject.tokenizer, subject.model.cfg.seq_len)
        encoded = [question for _, _, question in examples]
        n_rows = sum(len(question.rows) for question in encoded)
        with track(self.name, n_rows) as advance:
            scores = score(subject.model, encoded, advance)
        return lines_of(examples, scores)

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[NamedScore]:
        scores = []
        for i, level in enumerate(settings["levels"]):
            level_lines = [line for line in lines if line["level"] == i]
            if not level_lines:
                continue
            accuracy = share(level_lines, "correct")
            independent = len(level_lines)
            cluster = self.task.cluster
            if cluster:
                # Count clusters: the mean of a cluster varies at most as much as a single answer.
                independent = len({line[cluster] for line in level_lines})
            name = ", ".join(f"{key} {value}" for key, value in level.items())
            details: dict[str, Any] = {
                "level": level,
                "generated": share(level_lines, "generated"),
                "independent": independent,
            }
            for field in self.task.by:
                details[f"by_{field}"] = shares(level_lines, field)
            interval = wilson(accuracy, independent)
            guess = chance(level_lines)
            scores.append(NamedScore(name, accuracy, interval, len(level_lines), guess, details))
        return scores


Questions = list[tuple[int, Example, Question]]
"""For each example: index of the level, the example, and the encoded example."""


def questions(task: Task, settings: Settings, tokenizer: Tokenizer, longest: int) -> Questions:
    """Generate and encode the examples of a task; omit examples of more than `longest` tokens.

    Returns tuples (index of the difficulty level, example, encoded example). Raises ConfigError if
    all examples are omitted, or if the tokenizer cannot encode a candidate of the first example of
    a level. Candidates of later examples are not checked.

    Args:
        settings: result of `Answers.examples`.
    """
    count = tokenizer.count
    seed = settings["seed"]
    encoded: Questions = []
    for i, level in enumerate(settings["levels"]):
        first = next(iter(task.examples(level, 1, seed, count)), None)
        if first is not None:
            check_candidates(first, task, tokenizer)
        for example in task.examples(level, settings["examples"][i], seed, count):
            question = spelt_question(example, tokenizer)
            if question.positions <= longest:
                encoded.append((i, example, question))
    if not encoded:
        raise ConfigError(
            f"every example of the task {task.name} exceeds {longest} tokens, the maximum length "
            "of the model; choose shorter examples"
        )
    return encoded


def check_candidates(example: Example, task: Task, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the tokenizer cannot encode a candidate of an example of `task`."""
    for candidate in example.candidates:
        decoded = tokenizer.decode(tokenizer.encode(candidate))
        if decoded.strip() != candidate.strip():
            raise ConfigError(
                f"the run's tokenizer cannot encode {candidate!r}, an answer of the task "
                f"{task.name}: decoding returns {decoded!r}; choose another task"
            )


def lines_of(examples: Questions, example_scores: Sequence[Sequence[Scored]]) -> list[Line]:
    """Return one dict per example for the results file, with keys such as "correct" and "answer".

    If an example has several candidates, "correct" means that the right candidate has the highest
    log-likelihood. Otherwise "correct" means that greedy decoding yields the only candidate.

    Args:
        example_scores: for each example, the score of each candidate.
    """
    lines = []
    for (level, example, _), scores in zip(examples, example_scores, strict=True):
        logs = []
        for scored in scores:
            # A diverged model has no finite likelihoods: no candidate is likely.
            is_finite = math.isfinite(scored.log_likelihood)
            logs.append(scored.log_likelihood if is_finite else -math.inf)
        likeliest = max(range(len(logs)), key=logs.__getitem__)
        # If no likelihood is finite, `likeliest` is 0, but no candidate counts as chosen.
        is_likeliest = likeliest == example.answer and math.isfinite(logs[likeliest])
        generated = scores[example.answer].greedy
        # JSON has no infinity.
        rounded_logs = [round(x, 5) if math.isfinite(x) else None for x in logs]
        line: Line = {
            "level": level,
            "correct": is_likeliest if len(logs) > 1 else generated,
            "generated": generated,
            "candidates": len(logs),
            "answer": example.answer,
            "log_likelihoods": rounded_logs,
        }
        lines.append({**line, **example.facts})
    return lines


def chance(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the expected accuracy of a uniformly random choice between the candidates.

    An example with a single candidate counts as 0.
    """
    chances = []
    for line in lines:
        n_candidates = line["candidates"]
        if n_candidates > 1:
            chances.append(1 / n_candidates)
    return sum(chances) / len(lines)


def share(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the share of `lines` whose value of `key` is true."""
    count = sum(bool(line[key]) for line in lines)
    return count / len(lines)


def shares(lines: Sequence[Mapping[str, Any]], field: str) -> dict[str, float]:
    """Group `lines` by their value of `field`; return the share of correct lines in each group.

    `field` is a key of the lines, such as "depth". The result maps each value to a share.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        group = groups.setdefault(str(line[field]), [])
        group.append(line)
    return {value: share(groups[value], "correct") for value in sorted(groups)}
