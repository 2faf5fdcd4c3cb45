"""A task as an evaluation: the share of right answers, by likelihood and by generation."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diffllm.core.errors import ConfigError
from diffllm.data import Tokenizer
from diffllm.data.progress import track
from diffllm.data.tasks import VERSION
from diffllm.data.tasks.task import Example, Level, Task
from diffllm.evaluation.evaluation import Asked, Evaluation, Line, Score, Settings, Subject
from diffllm.evaluation.results import SHARE
from diffllm.evaluation.scoring import Question, Scored, question_of, score

A_LEVEL = 50
"""Examples of a level, where no limit says less."""
SCORES = 2
"""Changed whenever scores change, so that older results are made anew."""


class Answers(Evaluation):
    """Asks a checkpoint the examples of a task.

    The answer by likelihood is the candidate that the model finds likeliest; that by generation is
    right where the likeliest tokens, one after the other, are those of the right one.
    """

    unit = SHARE

    def __init__(self, task: Task):
        self.task, self.name = task, task.name

    def settings(self, subject: Subject, asked: Asked) -> Settings:
        version = [VERSION, SCORES, self.task.version]
        return {"version": version, **self.examples(asked, subject.tokenizer, subject.cfg.seq_len)}

    def examples(self, asked: Asked, tokenizer: Tokenizer, seq_len: int) -> Settings:
        """Return the settings that decide the examples for a model of `seq_len` tokens; raises
        ConfigError for what does not fit."""
        levels = self.levels(asked.levels.get(self.name, ()), tokenizer, seq_len)
        return {
            "seed": asked.seed,
            "examples": numbers_of(self.task, levels, asked.limit),
            "levels": [dict(level) for level in levels],
        }

    def levels(self, wanted: Sequence[Level], tokenizer: Tokenizer, seq_len: int) -> list[Level]:
        """Return the levels that are wanted, or without any those that fit a model of `seq_len`
        tokens; raises ConfigError for what does not fit."""
        count, length = counter(tokenizer), seq_len - 1  # the end of a document comes first
        if not wanted:
            return self.task.fitting(length, count)
        self.task.check(wanted, length, count)
        return list(wanted)

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        asked = questions(self.task, settings, subject.tokenizer, subject.model.cfg.seq_len)
        with track(self.name, len(asked)) as advance:
            found = score(subject.model, [question for _, _, question in asked], advance)
        return [
            line(level, example, scores)
            for (level, example, _), scores in zip(asked, found, strict=True)
        ]

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[Score]:
        from scipy.stats import binomtest  # a second and a half that training does not need

        found = []
        for i, level in enumerate(settings["levels"]):
            own = [line for line in lines if line["level"] == i]
            if not own:
                continue
            right = sum(bool(line["correct"]) for line in own)
            interval = binomtest(right, len(own)).proportion_ci(method="wilson")
            facts = {f"by_{fact}": shares(own, fact) for fact in self.task.by}
            found.append(
                Score(
                    ", ".join(f"{key} {value}" for key, value in level.items()),
                    right / len(own),
                    (interval.low, interval.high),
                    len(own),
                    chance(own),
                    {"level": level, "generated": share(own, "generated"), **facts},
                )
            )
        return found


def numbers_of(task: Task, levels: Sequence[Level], limit: int | None) -> list[int]:
    """Return how many examples of each level are asked, `limit` at most of all together."""
    there = [task.number(level) for level in levels]
    usual = [A_LEVEL if number is None else number for number in there]
    if limit is None:
        return usual
    each, rest = divmod(limit, len(levels))
    return [min(n, each + (i < rest)) for i, n in enumerate(usual)]


def counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    return lambda text: len(tokenizer.encode(text))


def questions(
    task: Task, settings: Settings, tokenizer: Tokenizer, longest: int
) -> list[tuple[int, Example, Question]]:
    """Make the examples of each level, and spell them.

    Args:
        longest: positions of a context; the few examples that are longer than those by which their
            level was chosen are left out.
    """
    count = counter(tokenizer)
    check_spelling(task, settings, tokenizer)
    made = [
        (i, example, question_of(example, tokenizer))
        for i, (level, number) in enumerate(
            zip(settings["levels"], settings["examples"], strict=True)
        )
        for example in task.examples(level, number, settings["seed"], count)
    ]
    if kept := [each for each in made if each[2].positions <= longest]:
        return kept
    raise ConfigError(f"the task {task.name} has no example of at most {longest} tokens")


def check_spelling(task: Task, settings: Settings, tokenizer: Tokenizer) -> None:
    """Raise ConfigError where the tokenizer cannot spell the candidates of a task, judged by those
    of one example of each level."""
    for level in settings["levels"]:
        for example in task.examples(level, 1, settings["seed"], counter(tokenizer)):
            for candidate in example.candidates:
                said = tokenizer.decode(tokenizer.encode(candidate))
                if said.strip() != candidate.strip():
                    raise ConfigError(
                        f"the run's tokenizer cannot spell {candidate!r}, an answer of the task "
                        f"{task.name}: it makes {said!r} of it"
                    )


def line(level: int, example: Example, scores: Sequence[Scored]) -> Line:
    """Say what a model made of an example of a level; where there is one candidate alone, only
    generation can be wrong."""
    # Of a model that has diverged nothing is likely.
    logs = [x if math.isfinite(x := scored.log_likelihood) else -math.inf for scored in scores]
    likeliest = max(range(len(logs)), key=logs.__getitem__) == example.answer
    likeliest &= math.isfinite(logs[example.answer])
    generated = scores[example.answer].greedy
    return {
        "level": level,
        "correct": likeliest if len(logs) > 1 else generated,
        "generated": generated,
        "candidates": len(logs),
        "answer": example.answer,
        "log_likelihoods": [round(x, 5) if math.isfinite(x) else None for x in logs],
        **example.facts,
    }


def chance(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of right answers of a guess among candidates; 0 where there is one alone."""
    return sum(1 / n for n in (line["candidates"] for line in lines) if n > 1) / len(lines)


def share(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(bool(line[key]) for line in lines) / len(lines)


def shares(lines: Sequence[Mapping[str, Any]], fact: str) -> dict[str, float]:
    """Return the share of right answers for each value of a fact."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(str(line[fact]), []).append(line)
    return {value: share(own, "correct") for value, own in sorted(groups.items())}
