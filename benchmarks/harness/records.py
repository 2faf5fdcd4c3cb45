"""Measurements on disk: one JSON line each, found again by what they were measured with."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ("diffllm/**/*.py", "conf/**/*.yaml", "benchmarks/**/*.py", "tests/**/*.py", "train.py")


def code_hash(root: Path = ROOT) -> str:
    """Hash of the sources of the package, the configs, the benchmarks and the tests."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(root.glob(pattern)):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Records:
    """The measurements of one stage.

    Args:
        path: a JSONL file, appended to.
        stamp: what every measurement of this run was made with: code, torch and device.
        resume: whether successes that the file holds, with the same key, count as made.
    """

    def __init__(self, path: Path, stamp: dict[str, str], resume: bool):
        self.path, self.stamp = path, stamp
        path.parent.mkdir(parents=True, exist_ok=True)
        self.made = (
            {line["key"] for line in read(path) if line["status"] == "ok"} if resume else set()
        )

    def key(self, name: str, config: Any) -> str:
        """Hash of a measurement's name, its config and the stamp."""
        text = json.dumps([self.stamp, name, config], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def has(self, name: str, config: Any) -> bool:
        """Whether a measurement has succeeded."""
        return self.key(name, config) in self.made

    def add(self, name: str, config: Any, status: str, result: Any, seconds: float) -> None:
        """Append a measurement, and have it on disk before anything else happens."""
        line = {
            "key": self.key(name, config),
            "name": name,
            "status": status,
            "result": result,
            "config": config,
            "seconds": round(seconds, 1),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            **self.stamp,
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if status == "ok":
            self.made.add(line["key"])
        outcome = "" if status == "ok" else f": {status}, {result}"
        print(f"{name} ({seconds:.0f} s){outcome}", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """All measurements of a file; a line that was cut off is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def newest(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last measurement of each name, a success before a failure of the same key."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        before = found.get(line["name"])
        if before and before["status"] == "ok" != line["status"] and before["key"] == line["key"]:
            continue
        found[line["name"]] = line
    return found
