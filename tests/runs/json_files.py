"""JSON files: read and write values and lines."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_jsonl(path: Path) -> list[Any]:
    """Return the value of each line of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    path.write_text(json.dumps(value), encoding="utf-8")
