"""Suites of evaluations: for saved checkpoints, and for tasks that run during training."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from diffllm.checkpoint.manifest import MANIFEST
from diffllm.config import TrainConfig
from diffllm.core.errors import ConfigError, choose_from, did_you_mean
from diffllm.core.files import user_path
from diffllm.core.run_files import finite, step_of
from diffllm.data.tasks.task import (
    AVAILABLE,
    REMOVED_TASKS,
    TASKS,
    DoesNotFit,
    Level,
    OwnFile,
    levels_of,
)
from diffllm.data.text.file_index import JSON_LINES
from diffllm.data.tokenizer import Tokenizer
from diffllm.evaluation.answers import (
    Answers,
    Questions,
    chance,
    lines_of,
    questions,
    share,
)
from diffllm.evaluation.attention_mass import PREFIX, AttentionMass
from diffllm.evaluation.evaluation import (
    Evaluation,
    EvaluationOptions,
    Subject,
    check_examples_file,
    read_result,
    results_of,
    store_result,
)
from diffllm.evaluation.outliers import Outliers
from diffllm.evaluation.position import Position
from diffllm.evaluation.quantise import Quantise
from diffllm.evaluation.scoring import score_batches

EVALUATIONS: dict[str, Evaluation] = {
    evaluation.name: evaluation for evaluation in (Position(), Outliers(), Quantise())
}
"""Evaluations by name, except generated tasks."""
NEEDLES = [
    {"needles": 1, "queries": 1},
    {"needles": 2, "queries": 2},
    {"needles": 4, "queries": 2},
    {"needles": 6, "queries": 2},
]
SUITES: dict[str, dict[str, Sequence[Level]]] = {
    "claims": dict.fromkeys(("needle", "mqar", "icl"), ()),
    "attention_mass": {f"{PREFIX}{name}": () for name in ("needle", "mqar")},
    "checkpoint": dict.fromkeys(EVALUATIONS, ()),
    "needle_4k": {"needle": [{"length": 4096, **needles} for needles in NEEDLES]},
    "needle_64k": {
        "needle": [
            {"length": 1024 * length, "needles": 8, "queries": 1} for length in (8, 16, 32, 48, 64)
        ]
    },
}
"""Evaluations by suite, with fixed levels if the suite sets any. Levels of needles follow section
3.4 of arXiv 2410.05258: 4K with N needles and R queries, and 64K by length and depth."""
Result = dict[str, Any]
"""The "unit" of an evaluation, and its "scores": a dict per score, see `NamedScore`."""


def chosen(
    suite: str, names: Sequence[str], levels: Sequence[Level]
) -> tuple[list[Evaluation], EvaluationOptions]:
    """Return the chosen evaluations, and `EvaluationOptions` with their levels of difficulty.

    The chosen evaluations are those in `names` or, if `names` is empty, all evaluations of `suite`.
    Raises ConfigError if a name or the suite is unknown, if two files have one name, or if `levels`
    is not empty and several evaluations are chosen.

    Args:
        names: names of tasks or evaluations, or paths of .jsonl or .ndjson files of examples.
        levels: levels of difficulty for a single task; if empty, use the levels of the suite.
    """
    if suite not in SUITES:
        raise ConfigError(f"suite={suite} does not exist{choose_from(suite, list(SUITES))}")
    by_name: dict[str, Evaluation] = {}
    for name in names or SUITES[suite]:
        evaluation = evaluation_named(name)
        check_same_examples(by_name.setdefault(evaluation.name, evaluation), evaluation)
    if levels and len(by_name) != 1:
        raise ConfigError(
            f"level={list(map(dict, levels))} applies to a single task, but {len(by_name)} are "
            "selected; select one with tasks=[NAME]"
        )
    levels_by_name: dict[str, Sequence[Level]] = {}
    for name in by_name:
        fixed_levels = SUITES[suite].get(name)
        if levels:
            levels_by_name[name] = levels
        elif fixed_levels:
            levels_by_name[name] = fixed_levels
    return list(by_name.values()), EvaluationOptions(levels=levels_by_name)


def check_same_examples(first: Evaluation, second: Evaluation) -> None:
    """Raise ConfigError if two evaluations of one name read different files of examples."""
    if first.examples_file != second.examples_file:
        files = first.examples_file, second.examples_file
        paths = " and ".join(file.path for file in files if file)
        raise ConfigError(
            f"tasks: {paths} have the same name {first.name}, which identifies their results; "
            "rename one of the files, or add a link with another name"
        )


def evaluation_named(name: str, allowed_names: Sequence[str] = ()) -> Evaluation:
    """Find an evaluation by its name, by the name of a task, or by the path of a file of examples.

    Raises ConfigError for an unknown name. The message lists the allowed names: those in
    `allowed_names` or, if this is empty, the names of all tasks and evaluations.
    """
    if name.endswith(JSON_LINES):
        task = OwnFile(user_path(name, "tasks"))
        if task.name.removeprefix(PREFIX) in TASKS or task.name in EVALUATIONS:
            raise ConfigError(
                f"tasks: {name} has the name of the task {task.name}; rename the file"
            )
        return Answers(task)
    if name in EVALUATIONS:
        return EVALUATIONS[name]
    if name in TASKS:
        return Answers(TASKS[name])
    task_name = name.removeprefix(PREFIX)
    if task_name != name and task_name in TASKS:
        return AttentionMass(TASKS[task_name])
    if name in REMOVED_TASKS:
        raise ConfigError(f"tasks: {name} was removed; use {AVAILABLE}")
    if not allowed_names:
        allowed_names = sorted([*TASKS, *EVALUATIONS, *SUITES["attention_mass"]])
    allowed = f"{', '.join(allowed_names)}, or a {' or '.join(JSON_LINES)} file"
    suggestion = did_you_mean(name, allowed_names)
    raise ConfigError(f"tasks: {name} must be one of {allowed}{suggestion}")


def evaluate(
    subject: Subject, evaluations: Sequence[Evaluation], options: EvaluationOptions
) -> tuple[dict[str, Result], list[str]]:
    """Run all evaluations; return results by evaluation name, and a message per skipped evaluation.

    An evaluation is skipped if its task does not fit into the model's maximum length. A stored
    result is reused if the checkpoint, the tokenizer and all settings are unchanged. Raises
    ConfigError before the first evaluation if a result for other examples would be overwritten.
    """
    results: dict[str, Result] = {}
    skipped = []
    directory = results_of(subject.run, step_of(subject.checkpoint))
    files = {evaluation.name: directory / f"{evaluation.name}.jsonl" for evaluation in evaluations}
    # Check all files first, so that no evaluation runs in vain.
    for evaluation in evaluations:
        check_examples_file(files[evaluation.name], evaluation.examples_file)
    manifest = (subject.checkpoint / MANIFEST).read_bytes()
    for evaluation in evaluations:
        try:
            settings = evaluation.settings(subject, options)
        except DoesNotFit as error:
            skipped.append(str(error))
            continue
        key = {
            "evaluation": evaluation.name,
            "checkpoint": hashlib.sha256(manifest).hexdigest(),
            "tokenizer": subject.tokenizer.pieces_hash,
            **settings,
        }
        header = read_result(files[evaluation.name], key)
        if header is None:
            lines = evaluation.lines(subject, settings)
            scores = []
            for score in evaluation.scores(settings, lines):
                content = asdict(score)
                details = content.pop("more")
                # A diverged model may have an infinite value, which JSON cannot hold.
                scores.append({**content, "value": finite(score.value), **details})
            header = {"key": key, "unit": evaluation.unit, "scores": scores}
            if evaluation.examples_file:
                header["examples_file"] = evaluation.examples_file._asdict()
            store_result(files[evaluation.name], header, lines)
        results[evaluation.name] = {name: header[name] for name in ("unit", "scores")}
    return results, skipped


def tasks_of(cfg: TrainConfig) -> "Callable[[Tokenizer], TasksWhileTraining] | None":
    """Check eval.suites and eval.levels; return a function that creates a `TasksWhileTraining`.

    Return None if eval.suites is empty. Raises ConfigError for invalid settings.

    The argument of the returned function is the tokenizer. The returned function raises ConfigError
    if a task does not fit into the sequence length of the run.
    """
    tasks: dict[str, Answers] = {}
    levels: dict[str, Sequence[Level]] = {}
    selected_by: dict[str, str] = {}
    allowed_names = sorted({*TASKS, *SUITES} - {"checkpoint", "attention_mass"})
    for name in cfg.eval.suites:
        try:
            if name in SUITES:
                evaluations, options = chosen(name, [], [])
            else:
                evaluations = [evaluation_named(name, allowed_names)]
                options = EvaluationOptions()
            for evaluation in evaluations:
                check_same_examples(tasks.get(evaluation.name, evaluation), evaluation)
        except ConfigError as error:
            raise ConfigError(f"eval.suites: {str(error).removeprefix('tasks: ')}") from None
        for evaluation in evaluations:
            if not isinstance(evaluation, Answers):
                raise ConfigError(
                    f"eval.suites: {evaluation.name} cannot be evaluated during training; after "
                    f"training, use diffllm evaluate tasks=[{evaluation.name}]"
                )
            task_name = evaluation.name
            suite_levels = options.levels.get(task_name, ())
            differs = levels.get(task_name, suite_levels) != suite_levels
            if differs and task_name not in cfg.eval.levels:
                raise ConfigError(
                    f"eval.suites: {selected_by[task_name]} and {name} contain the task "
                    f"{task_name} at different levels; keep one of them, or set "
                    f"eval.levels={{{task_name}: ...}}"
                )
            tasks[task_name] = evaluation
            levels[task_name] = suite_levels
            selected_by[task_name] = name
    for name, level in cfg.eval.levels.items():
        if name not in tasks:
            raise ConfigError(
                f"eval.levels: {name} must be a task of eval.suites={cfg.eval.suites}; "
                f"add {name} to eval.suites, or remove it from eval.levels"
            )
        levels[name] = levels_of(level, f"eval.levels: {name}")
    if not tasks:
        return None
    by_task = {task: levels[name] for name, task in tasks.items()}
    return lambda tokenizer: TasksWhileTraining(cfg, by_task, tokenizer)


class TasksWhileTraining:
    """Tasks that are evaluated during training; every evaluation uses the same examples."""

    def __init__(
        self, cfg: TrainConfig, levels_by_task: dict[Answers, Sequence[Level]], tokenizer: Tokenizer
    ):
        self.examples: dict[str, Questions] = {}
        self.levels: dict[str, list[str]] = {}
        """By task: names of levels in names of metrics, such as "length_96_needles_2"."""
        for task, levels in levels_by_task.items():
            limit = cfg.eval.suites_limit
            options = EvaluationOptions(limit=limit, levels={task.name: levels})
            settings = task.examples(options, tokenizer, cfg.seq_len)
            self.examples[task.name] = questions(task.task, settings, tokenizer, cfg.seq_len)
            level_names = []
            for level in settings["levels"]:
                words = [f"{key}_{value}" for key, value in level.items()]
                level_names.append("_".join(words))
            self.levels[task.name] = level_names

    def __call__(self, model: Any) -> dict[str, float]:
        """Return the share of correct answers of each task, as a dict from metric names to values.

        `tasks/<task>` and, if the task has several levels, `tasks/<task>/<level>` are the shares of
        answers that `lines_of` marks as correct. `tasks_generated/<task>` is the share of examples
        that greedy decoding answers correctly. `tasks_chance/<task>` is the expected share of
        correct answers among random answers. Every rank must call this method.
        """
        model.eval()
        metrics: dict[str, float] = {}
        for name, examples in self.examples.items():
            encoded = [question for _, _, question in examples]
            # Batches differ in shape, and each shape would be compiled anew.
            with torch.compiler.set_stance("force_eager"):
                scores = score_batches(model, encoded, together=True)
            lines = lines_of(examples, scores)
            metrics[f"tasks/{name}"] = share(lines, "correct")
            metrics[f"tasks_chance/{name}"] = chance(lines)
            metrics[f"tasks_generated/{name}"] = share(lines, "generated")
            for i, level in enumerate(self.levels[name]):
                level_lines = [line for line in lines if line["level"] == i]
                if level_lines and len(self.levels[name]) > 1:
                    metrics[f"tasks/{name}/{level}"] = share(level_lines, "correct")
        model.train()
        return metrics
