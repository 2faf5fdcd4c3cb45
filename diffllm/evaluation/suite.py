"""Suites: evaluations of a checkpoint one after the other, each kept as soon as it is done."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from diffllm.checkpoint import step_of
from diffllm.checkpoint.manifest import NAME as MANIFEST
from diffllm.data.text.formats import JSON_LINES
from diffllm.errors import ConfigError
from diffllm.evaluation import outliers, position, quantise  # noqa: F401  registered by that
from diffllm.evaluation.answers import Answers
from diffllm.evaluation.evaluation import EVALUATIONS, Asked, Evaluation, Score, Subject
from diffllm.evaluation.results import keep, kept, results_of
from diffllm.files import user_path
from diffllm.files.records import finite
from diffllm.tasks.own_file import OwnFile
from diffllm.tasks.task import REMOVED, REPLACED, TASKS, Level

NEEDLES = [{"needles": n, "asked": r} for n, r in ((1, 1), (2, 2), (4, 2), (6, 2))]
SUITES: dict[str, dict[str, Sequence[Level]]] = {
    "claims": dict.fromkeys(("needle", "mqar", "icl"), ()),
    "checkpoint": dict.fromkeys(("position", "outliers", "quantise"), ()),
    "needle_4k": {"needle": [{"length": 4000, **needles} for needles in NEEDLES]},
    "needle_64k": {
        "needle": [
            {"length": 1000 * length, "needles": 8, "asked": 1} for length in (8, 16, 32, 48, 64)
        ]
    },
}
"""Evaluations by suite, with the levels that a suite insists on. Those of needles are as in section
3.4 of arXiv 2410.05258: 4K with N needles of which R are asked for, and 64K by length and depth."""
Result = dict[str, Any]
"""The "unit" of an evaluation, and its "scores", a dict for each, see `Score`."""


def chosen(
    suite: str, names: Sequence[str], levels: Sequence[Level]
) -> tuple[list[Evaluation], Asked]:
    """Return the evaluations of a suite, or those named, and the levels that are asked of them.

    Raises ConfigError for unknown ones, and for a level without the one task that it is of.

    Args:
        names: a task, an evaluation, or the path of a .jsonl or .ndjson file of examples.
        levels: those of the task that is named alone, none for those that fit.
    """
    if suite not in SUITES:
        raise ConfigError(f"suite={suite} must be one of {', '.join(SUITES)}")
    wanted = list(dict.fromkeys(names)) or list(SUITES[suite])
    if levels and len(wanted) != 1:
        raise ConfigError("level is of one task: name it by tasks=[...]")
    found = [named(name) for name in wanted]
    if levels:
        return found, Asked(levels={found[0].name: levels})
    own = {name: fixed for name, fixed in SUITES[suite].items() if fixed and name in wanted}
    return found, Asked(levels=own)


def named(name: str) -> Evaluation:
    """Return the evaluation of a name; raises ConfigError where there is none."""
    if name.endswith(JSON_LINES):
        task = OwnFile(user_path(name, "tasks"))
        if task.name in TASKS or task.name in EVALUATIONS:
            raise ConfigError(f"tasks: {name} has the name of the task {task.name}; rename it")
        return Answers(task)
    if name in EVALUATIONS:
        return EVALUATIONS[name]
    if name in TASKS:
        return Answers(TASKS[name])
    if name in REMOVED:
        raise ConfigError(f"tasks: {name} {REPLACED}")
    known = ", ".join(sorted([*TASKS, *EVALUATIONS]))
    raise ConfigError(f"tasks: {name} must be one of {known}, or a {' or '.join(JSON_LINES)} file")


def evaluate(
    subject: Subject, evaluations: Sequence[Evaluation], asked: Asked
) -> Iterator[tuple[str, Result]]:
    """Yield the result of each evaluation, from its file where it has been made before."""
    directory = results_of(subject.run, step_of(subject.checkpoint))
    for each in evaluations:
        settings = each.settings(subject, asked)
        key = key_of(subject, each.name, settings)
        file = directory / f"{each.name}.jsonl"
        first = kept(file, key)
        if first is None:
            lines = each.lines(subject, settings)
            scores = [flat(score) for score in each.scores(settings, lines)]
            first = {"key": key, "unit": each.unit, "scores": scores}
            keep(file, first, lines)
        yield each.name, {name: first[name] for name in ("unit", "scores")}


def key_of(subject: Subject, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a result depends on."""
    manifest = (subject.checkpoint / MANIFEST).read_bytes()
    return {
        "evaluation": name,
        "checkpoint": hashlib.sha256(manifest).hexdigest(),
        "tokenizer": subject.tokenizer.pieces_hash,
        **settings,
    }


def flat(score: Score) -> dict[str, Any]:
    """Return a score as JSON, its further facts beside the others."""
    content = asdict(score)
    more = content.pop("more")
    # A diverged model may have an infinite value, which JSON cannot hold.
    return {**content, "value": finite(score.value), **more}
