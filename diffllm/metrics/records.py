"""The JSON files of a run and of a sweep: which of their fields others rely on, and their types."""

import json
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from diffllm.core.files import parse_json, read_json, read_lines, readable

NUMBER: tuple[type, ...] = (int, float)
TEXT: tuple[type, ...] = (str,)
SUMMARY: dict[str, tuple[type, ...]] = {
    "steps": (int,),
    **dict.fromkeys(
        ("heldout_loss", "heldout_bits_per_byte", "train_loss", "tokens"),
        NUMBER,
    ),
    "stopped": TEXT,
}  # fmt: skip
FACTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("parameters", "active_parameters", "flops_per_token", "heldout_tokens", "ranks"),
        NUMBER,
    ),
    **dict.fromkeys(
        ("corpus", "corpus_note", "tokenizer", "device", "compute_dtype", "torch"), TEXT
    ),
    **dict.fromkeys(("diffllm", "imported", "environment", "plugin_code"), (dict,)),
}  # fmt: skip
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "summary.json": SUMMARY,
    "run.json": FACTS,
    "diverged.json": {"step": (int,), "reason": TEXT},
    "saved.json": {"step": (int,)},
    "sweep.json": {"keys": (list,), "runs": (dict,), "jobs": (dict,)},
}
"""The fields of each file, and what they are where they are there and not null. Others are only
shown, and left out where they are odd."""
WORDS = {
    (int,): "a whole number",
    NUMBER: "a number",
    TEXT: "text",
    (list,): "a list",
    (dict,): "an object",
}
REQUIRED = {"saved.json": ("step",)}
POSITIVE = ("parameters", "active_parameters", "flops_per_token")
LARGEST = 1e40
"""Larger numbers count as not finite, since statistics take their fourth powers."""


def read_summary(run: Path) -> dict[str, Any] | None:
    """Read the summary.json of a run; None until it has reached a last step, and where it stopped
    because it had diverged."""
    found = read_ending(run)
    return None if found is None or found.get("stopped") else found


def read_ending(run: Path) -> dict[str, Any] | None:
    """Read the summary.json of a run that has ended, also of one that stopped because it had
    diverged: that one says why in `stopped`."""
    return read_record(run / "summary.json")


def gave_up(run: Path) -> bool:
    """Whether a run stopped because it had diverged; one of an older version then has diverged.json
    and no summary."""
    found = read_ending(run)
    if found is None:
        return read_record(run / "diverged.json") is not None
    return bool(found.get("stopped"))


def stopped_text(ending: dict[str, Any]) -> str:
    """Say where and why a run stopped that had diverged, from what `read_ending` found."""
    return f"stopped after step {ending.get('steps')}: {ending['stopped']}"


def read_record(file: Path) -> dict[str, Any] | None:
    """Read a JSON file of a run or of a sweep; None if it is missing.

    Numbers that are not finite, or beyond LARGEST, become None. Raises CheckpointError if the file
    cannot be read or a field has the wrong type.
    """
    with readable(file), suppress(FileNotFoundError, NotADirectoryError):
        content = read_json(file)
        check_fields(file.name, content)
        return {k: finite(v) if isinstance(v, float) else v for k, v in content.items()}
    return None


def finite(value: Any) -> float | None:
    """Return a finite number up to LARGEST as a float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return None
    return float(value)


def check_fields(name: str, content: dict[str, Any]) -> None:
    """Raise ValueError unless the fields of a file of this name are of their types."""
    for field, kinds in FIELDS[name].items():
        value = content.get(field)
        if value is None:
            if field in REQUIRED.get(name, ()):
                raise ValueError(f"has no {field}")
        elif type(value) not in kinds:
            raise ValueError(f"has no usable {field}: it is not {WORDS[kinds]}")
        elif field in POSITIVE and value <= 0:
            raise ValueError(f"has no usable {field}: {value:g} is not above 0")
    if name == "sweep.json":
        check_sweep(content)
    if name == "run.json" and not all_text([*(content.get("plugin_code") or {}).values()]):
        raise ValueError("has no usable plugin_code: a version is not text")


def check_sweep(content: dict[str, Any]) -> None:
    """Raise ValueError unless keys are text, runs lists of it by names, and jobs text by names."""
    if not all_text(content.get("keys") or []):
        raise ValueError("has no usable keys: they are not text")
    for name, words in (content.get("runs") or {}).items():
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or not inside.parts or "\0" in name:
            raise ValueError("has no usable runs: a name is no directory below the sweep's")
        if not isinstance(words, list) or not all_text(words):
            raise ValueError("has no usable runs: they are not lists of overrides")
    if not all_text(list((content.get("jobs") or {}).values())):
        raise ValueError("has no usable jobs: they are not text")


def all_text(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def read_changes(run: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's changes.jsonl, each with `step` and `changes`, a pair of values by
    key; none where there is no file. Raises CheckpointError."""
    file = run / "changes.jsonl"
    found = []
    with readable(file), suppress(FileNotFoundError, NotADirectoryError):
        for text in read_lines(file):
            line = parse_json(text)
            if not is_change(line):
                raise ValueError("has a line that is no change of a run")
            found.append(line)
    return found


def is_change(line: Any) -> bool:
    """Whether a line is of the form {"step": 3, "changes": {"seed": [0, 1]}}."""
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return False
    changes = line.get("changes")
    return isinstance(changes, dict) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in changes.values()
    )


def read_metrics_line(text: str) -> dict[str, Any] | None:
    """Read a line of metrics.jsonl: step, tokens, and numbers or nulls; None for any other line.

    Numbers that are not finite, or beyond LARGEST, become None.
    """
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or {type(v) for v in line.values()} - {int, float, type(None)}:
        return None
    place = {k: line[k] for k in ("step", "tokens") if type(line.get(k)) is int}
    if len(place) < 2 or not all(0 <= count < 2**53 for count in place.values()):
        return None
    return {k: finite(v) for k, v in line.items()} | place
