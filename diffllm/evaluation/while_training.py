"""Tasks of a model while it is trained: shares of right answers, at an interval."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diffllm.config import TrainConfig
from diffllm.data import Tokenizer
from diffllm.errors import ConfigError
from diffllm.evaluation.answers import Answers, line, questions, share
from diffllm.evaluation.evaluation import Asked
from diffllm.evaluation.scoring import Question, score_batches
from diffllm.evaluation.suite import SUITES, chosen
from diffllm.tasks.task import Example, Level, levels_of


def wanted(cfg: TrainConfig) -> dict[Answers, Sequence[Level]]:
    """Return the tasks that `eval.suites` names, with the levels of each that have to be tried.

    Raises ConfigError for one that there is not, or that needs more than a model.
    """
    found: dict[Answers, Sequence[Level]] = {}
    for name in cfg.eval.suites:
        suite, tasks = (name, []) if name in SUITES else ("claims", [name])
        try:
            evaluations, asked = chosen(suite, tasks, [])
        except ConfigError as error:
            raise ConfigError(f"eval.suites: {str(error).removeprefix('tasks: ')}") from None
        for each in evaluations:
            if not isinstance(each, Answers):
                raise ConfigError(
                    f"eval.suites: {each.name} is measured on checkpoints: "
                    f"diffllm evaluate tasks=[{each.name}]"
                )
            found[each] = asked.levels.get(each.name, ())
    names = [each.name for each in found]
    own: dict[str, Sequence[Level]] = {}
    for name, level in cfg.eval.levels.items():
        if name not in names:
            raise ConfigError(f"eval.levels: {name} is not in eval.suites={cfg.eval.suites}")
        try:
            own[name] = levels_of(level)
        except ConfigError as error:
            raise ConfigError(f"eval.levels: {name} {error}") from None
    return {each: own.get(each.name, levels) for each, levels in found.items()}


def tasks_of(cfg: TrainConfig) -> "Callable[[Tokenizer], TasksWhileTraining] | None":
    """Check eval.suites, and return the maker of its tasks; None without tasks.

    The maker raises ConfigError for a task that does not fit the run.
    """
    found = wanted(cfg)
    return (lambda tokenizer: TasksWhileTraining(cfg, found, tokenizer)) if found else None


class TasksWhileTraining:
    """The questions of a run's tasks, always the same, made once."""

    def __init__(
        self, cfg: TrainConfig, found: dict[Answers, Sequence[Level]], tokenizer: Tokenizer
    ):
        self.asked: list[tuple[str, list[tuple[int, Example, Question]], list[str]]] = []
        for each, levels in found.items():
            asked = Asked(limit=cfg.eval.suites_limit, levels={each.name: levels})
            settings = each.examples(asked, tokenizer, cfg.seq_len)
            made = questions(each.task, settings, tokenizer, cfg.seq_len)
            self.asked.append((each.name, made, [short(level) for level in settings["levels"]]))

    def __call__(self, model: Any) -> dict[str, float]:
        """Return `tasks/<name>`, the share of right answers by likelihood, `tasks/<name>/<level>`
        of one level alone, and `tasks_generated/<name>`; every rank calls it."""
        model.eval()
        found: dict[str, float] = {}
        for name, asked, levels in self.asked:
            with torch.compiler.set_stance("force_eager"):  # every batch has a shape of its own
                scores = score_batches(model, [question for _, _, question in asked], together=True)
            lines = [
                line(level, example, own)
                for (level, example, _), own in zip(asked, scores, strict=True)
            ]
            found[f"tasks/{name}"] = share(lines, "correct")
            found[f"tasks_generated/{name}"] = share(lines, "generated")
            for i, level in enumerate(levels):
                own = [each for each in lines if each["level"] == i]
                if own and len(levels) > 1:
                    found[f"tasks/{name}/{level}"] = share(own, "correct")
        model.train()
        return found


def short(level: Level) -> str:
    """Name a level within a metric's name, as "length_96_needles_2"."""
    return "_".join(f"{key}_{value}" for key, value in level.items())
