"""Results of evaluations below a run: a JSON Lines file each, its first line the scores.

That line has the key that all others were made with, the unit, and a dict a score.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffllm.errors import CheckpointError
from diffllm.files import parse_json, read_lines, write_atomic

DIRECTORY = "evaluation"
SHARE = "share of right answers"
"""The unit of tasks."""
Line = dict[str, Any]
Lines = Mapping[str, Line]
"""Scores of a run by name, or results of a checkpoint by evaluation."""


def results_of(run: Path, step: int) -> Path:
    """Return where the results of a run's checkpoint are kept."""
    return run / DIRECTORY / f"step-{step:08d}"


def kept(file: Path, key: Mapping[str, Any]) -> list[Line] | None:
    """Read the lines that were made with the same key; None without them."""
    try:
        first, *lines = map(parse_json, read_lines(file))
        return lines if first["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(file: Path, first: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """Write a result; raises CheckpointError where it cannot be written."""
    text = "".join(json.dumps(line) + "\n" for line in [first, *lines])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror}") from error
    write_atomic(file, text)


def all_results(run: Path) -> dict[int, Lines]:
    """Read the first lines of the results of each checkpoint that has any, by evaluation, by step,
    the oldest first; those that cannot be read are left out."""
    found: dict[int, Lines] = {}
    for place in sorted((run / DIRECTORY).glob("step-*")):
        if not re.fullmatch(r"step-\d{8}", place.name) or not place.is_dir():
            continue
        files = sorted(place.glob("*.jsonl"))
        if own := {file.stem: first for file in files if (first := first_line(file))}:
            found[int(place.name.removeprefix("step-"))] = own
    return found


def first_line(file: Path) -> Line | None:
    """Read the scores of a result; None unless they are ones."""
    try:
        first = parse_json(next(iter(read_lines(file))))
    except (OSError, ValueError, StopIteration):
        return None
    if not isinstance(first, dict) or not isinstance(first.get("key"), dict):
        return None
    scores = first.get("scores")
    if not isinstance(scores, list) or not isinstance(first.get("unit"), str):
        return None
    if not all(isinstance(each, dict) and isinstance(each.get("of"), str) for each in scores):
        return None
    return first
