"""JSON files: read and write values and lines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_jsonl(path: Path) -> list[Any]:
    """Return the value of each line of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def strict_json(text: str) -> Any:
    """Parse JSON; raise ValueError for NaN and infinity, which are not valid JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def write_jsonl(path: Path, values: Iterable[Any]) -> Path:
    """Write each value as a line; return the path."""
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values), encoding="utf-8")
    return path


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    path.write_text(json.dumps(value), encoding="utf-8")
