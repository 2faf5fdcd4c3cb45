"""Run measurements one after another; record results as JSON lines and Markdown."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffllm.core.printing import Table
from harness.process import ROOT, call

SOURCES = ("diffllm/**/*.py", "conf/**/*.yaml", "benchmarks/**/*.py", "tests/**/*.py", "train.py")
LEAST_S = 30  # with fewer seconds left, no measurement starts


@dataclass(frozen=True)
class Measurement:
    """One function call in a separate process."""

    name: str
    """"GROUP: CONTESTANT" if a table compares several measurements."""
    call: str
    """Dotted name of the function, with its module."""
    arguments: dict[str, Any] = field(default_factory=dict)
    limit: float = 120
    """Seconds, including the start of the process."""


def run(
    items: Sequence[Measurement], folder: Path, stamp: dict[str, str], resume: bool, deadline: float
) -> list[str]:
    """Run measurements and append results to results.jsonl.

    Return the names of measurements that did not start before the deadline.

    Args:
        stamp: code, torch and device of this run.
        resume: whether to skip successful measurements in the file with equal stamp, name and
            arguments.
        deadline: time.monotonic() at which all measurements must end; shortens their limits.
    """
    path, logs, left = folder / "results.jsonl", folder / "logs", []
    logs.mkdir(parents=True, exist_ok=True)
    done = {line["key"] for line in read(path) if line["status"] == "ok"} if resume else set()
    for item in items:
        found = {"name": item.name, "arguments": item.arguments, **stamp}
        key = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
        if key in done:
            continue
        start, cpu = time.monotonic(), children_cpu_seconds()
        limit = min(item.limit, deadline - start)
        if limit < min(item.limit, LEAST_S):
            left.append(item.name)
            continue
        log = logs / f"{item.name.replace(' ', '-').replace('/', '-')}.log"
        status, result = call(item.call, item.arguments, limit, log)
        seconds = time.monotonic() - start
        spent = {"seconds": seconds, "cpu_seconds": children_cpu_seconds() - cpu}
        line = {"key": key, "status": status, "result": result, **spent, **found}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        failure = "" if status == "ok" else f": {status}, {result}"
        print(f"{item.name} ({seconds:.0f} s){failure}", flush=True)
    return left


def children_cpu_seconds() -> float:
    """Return the CPU seconds of all ended child processes."""
    used = os.times()
    return used.children_user + used.children_system


def code_hash() -> str:
    """Return a hash of all source files: package, configs, benchmarks and tests."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a JSONL file except incomplete ones."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def table(folder: Path) -> str:
    """Return Markdown tables of the last result of each measurement, one table per group."""
    lines = {line["name"]: line for line in read(folder / "results.jsonl")}
    stamps = (f"{x['device']}, torch {x['torch']}, code {x['code']}" for x in lines.values())
    sections = ["; ".join(dict.fromkeys(stamps)) + "\n"]
    groups: dict[str, dict[str, Any]] = {}
    others: list[list[str]] = []
    failed: list[list[str]] = []
    for name, line in lines.items():
        group, colon, contestant = name.partition(": ")
        if line["status"] != "ok":
            failed.append([name, line["status"], cell(line["result"])])
        elif colon and group != "kernels":
            rows = groups.setdefault(group, {})
            result = line["result"]
            if result and all(isinstance(value, dict) for value in result.values()):
                rows |= {f"{contestant}, {kind}": values for kind, values in result.items()}
            else:
                rows[contestant] = result
        else:
            others.append([name, cell(line["result"])])
    tables = {group: compared(results) for group, results in groups.items()}
    tables["Others"] = Table.of(["", "result"], others)
    tables["Failed"] = Table.of(["", "status", "reason"], failed)
    sections += [f"## {name}\n\n{each.markdown()}\n" for name, each in tables.items() if each.rows]
    return "\n".join(sections)


def compared(results: dict[str, dict[str, Any]]) -> Table:
    """Return a table of a group's results; brackets contain the ratio to the first contestant."""
    first = next(iter(results.values()))
    keys = [key for key, value in first.items() if isinstance(value, int | float)]
    rows = []
    for name, result in results.items():
        cells = [cell(result.get(key, "")) for key in keys]
        if result is not first:
            for i, key in enumerate(keys):
                cells[i] += f" ({result[key] / first[key]:.2f})" if cells[i] and first[key] else ""
        rows.append([name, *cells])
    return Table.of(["", *keys], rows)


def cell(result: Any) -> str:
    if isinstance(result, dict):
        return "; ".join(f"{key}: {cell(value)}" for key, value in result.items())
    if isinstance(result, list):
        return ", ".join(map(cell, result))
    if isinstance(result, int | float):
        return f"{result:,.0f}" if abs(result) >= 1000 else f"{result:.4g}"
    return " ".join(str(result).split())[:300]
