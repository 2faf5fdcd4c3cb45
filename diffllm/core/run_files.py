"""Names of all files and folders in the directories of runs and sweeps, and their readers.

A new file of a run or sweep needs a member of an enum. If its content is a JSON object, it also
needs an entry in FIELDS. Other modules do not spell these names. The readers of steps.npy and
events.jsonl are next to their writers in `diffllm.metrics`.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import Any

from diffllm.core.files import parse_json, read_json, read_lines, readable
from diffllm.core.run_facts import NESTED, fact_types, positive_facts


class RunFile(StrEnum):
    """Files in a run directory, except those of the tokenizer.

    A run does not start if one of these paths exists and is not a regular file.
    """

    CONFIG = "config.yaml"
    FACTS = "run.json"
    SUMMARY = "summary.json"
    METRICS = "metrics.jsonl"
    STEPS = "steps.npy"
    EVENTS = "events.jsonl"
    CHANGES = "changes.jsonl"
    SAVED = "saved.json"
    """The last saved step. This file is not in checkpoints/, because checkpoints/ may be on another
    disk that is not mounted."""
    REQUEUE = "requeue"
    """Tells the launch script to requeue the job."""
    LOG = "run.log"
    """Copy of the terminal output, except in a sweep; see `sweep_log`."""
    LOCK = ".lock"
    """Also in the directories of sweeps and studies."""
    REPORT_PAGE = "report.html"
    """Like REPORT_TABLE, also in any other directory of a report."""
    REPORT_TABLE = "report.csv"


class RunFolder(StrEnum):
    """Folders in a run directory. A run does not start if one of these paths is not a directory."""

    CHECKPOINTS = "checkpoints"
    HELDOUT = "heldout"
    """Losses of held-out documents."""
    EVALUATION = "evaluation"
    """Results of `diffllm evaluate`."""
    TRACES = "traces"
    """Stack traces of stalled ranks."""
    PROFILE = "profile"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    """Also in the directories of sweeps and studies."""


CONSOLIDATED = "consolidated"
"""Folder of `diffllm consolidate` in a run directory. Training does not check this path."""


class SweepFile(StrEnum):
    """Files in the directory of a sweep or study; only COMPARISON_ID also in that of a run."""

    RECORD = "sweep.json"
    COMPARISON_ID = ".wandb-id"
    """Id in wandb of the run with the gaps of a comparison."""


def sweep_log(run: Path) -> Path:
    """Return the file with the terminal output of a run in a sweep. The file is next to the run."""
    return run.with_name(f"{run.name}.log")


def step_name(step: int) -> str:
    """Return the name of a checkpoint, and of folders and files about this checkpoint."""
    return f"step-{step:08d}"


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / step_name(step)


def hidden_path(directory: Path, step: int) -> Path:
    return directory / f".{step_name(step)}.incomplete"


COMPLETE, INCOMPLETE = re.compile(r"step-\d{1,18}"), re.compile(r"\.step-\d{1,18}\.incomplete")
"""Names of complete checkpoints, and of checkpoints that are partly saved or partly deleted."""


def step_of(path: Path) -> int:
    return int(path.name.removesuffix(".incomplete").rpartition("-")[2])


def list_checkpoints(directory: Path) -> list[Path]:
    """List the complete checkpoint directories in `directory`, oldest first."""
    checkpoints = []
    for path in directory.glob("step-*"):
        if COMPLETE.fullmatch(path.name) and path.is_dir():
            checkpoints.append(path)
    return sorted(checkpoints, key=step_of)


def list_incomplete(directory: Path) -> list[Path]:
    """List the checkpoint directories in `directory` that are partly saved or partly deleted."""
    paths = directory.glob(".step-*.incomplete")
    return sorted(path for path in paths if INCOMPLETE.fullmatch(path.name))


WHOLE, NUMBER, TEXT, LIST, OBJECT = (int,), (int, float), (str,), (list,), (dict,)
POSITIVE_FACTS = ("active_parameters", "flops_per_visible_key", *positive_facts())
TYPES_OF_FACTS = {name: types for name, types in fact_types().items() if name not in NESTED}
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    RunFile.SUMMARY: {
        "steps": WHOLE,
        "state": TEXT,
        "reason": TEXT,
        "stopped": TEXT,
        "heldout_loss": NUMBER,
        "heldout_bits_per_byte": NUMBER,
        "train_loss": NUMBER,
        "tokens": NUMBER,
        "visible_keys": NUMBER,
        "flops_per_token": NUMBER,
    },
    RunFile.FACTS: {
        **TYPES_OF_FACTS,
        "active_parameters": NUMBER,
        "flops_per_visible_key": NUMBER,
        "wandb_id": TEXT,
        "wandb_group": TEXT,
        "wandb_online": (bool,),
        "diffllm": OBJECT,
        "imported": OBJECT,
        "environment": OBJECT,
        "plugin_code": OBJECT,
    },
    RunFile.SAVED: {"step": WHOLE},
    SweepFile.RECORD: {"keys": LIST, "runs": OBJECT, "jobs": OBJECT},
}
"""The checked fields of each file; a missing field or null is valid, except in saved.json."""
LARGEST = 1e40
"""Larger numbers are treated as infinite, because statistics compute fourth powers."""


def read_summary(run: Path) -> dict[str, Any] | None:
    """Read the summary.json of a run; return None if the run has not ended, or if it diverged."""
    summary = read_ending(run)
    if summary is None or summary.get("stopped"):
        return None
    return summary


def read_ending(run: Path) -> dict[str, Any] | None:
    """Read the summary.json of a run; return None if the run has not ended.

    If the run diverged, the key "stopped" contains the reason for the divergence.
    """
    return read_record(run / RunFile.SUMMARY)


def diverged(run: Path) -> bool:
    ending = read_ending(run)
    return ending is not None and bool(ending.get("stopped"))


def stopped_text(ending: dict[str, Any]) -> str:
    """Format the summary of a diverged run as "stopped after step <step>: <reason>"."""
    return f"stopped after step {ending.get('steps')}: {ending['stopped']}"


def read_record(file: Path) -> dict[str, Any] | None:
    """Read a JSON file of a run or sweep, such as run.json; return None if the file is missing.

    Floats become None if they are not finite or if their magnitude exceeds LARGEST. Raises
    CheckpointError if the file cannot be read, or if a field in FIELDS has an invalid value.
    """
    with readable(file), suppress(FileNotFoundError, NotADirectoryError):
        content = read_json(file)
        check_record(file.name, content)
        for name, value in content.items():
            if isinstance(value, float):
                content[name] = finite(value)
        return content
    return None


def read_facts(run: Path) -> dict[str, Any]:
    """Read the run.json of a run; return {} if the file is missing."""
    return read_record(run / RunFile.FACTS) or {}


def recorded_variables(facts: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables that `facts`, the content of run.json, records."""
    # A missing environment is valid, as is null.
    environment = facts.get("environment") or {}
    variables = environment.get("variables")
    if not isinstance(variables, dict):
        return {}
    return {name: str(value) for name, value in variables.items()}


def finite(value: Any) -> float | None:
    """Return `value` as float if it is a number of magnitude at most LARGEST; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # `not <=` also rejects NaN.
    if not abs(value) <= LARGEST:
        return None
    return float(value)


def check_record(name: str, content: dict[str, Any]) -> None:
    """Raise ValueError if a field is invalid in `content`, the content of the file `name`.

    The checked fields of a file are those in FIELDS.
    """
    for field, types in FIELDS[name].items():
        value = content.get(field)
        if value is None:
            is_usable = name != RunFile.SAVED
        else:
            # Not isinstance, because Python counts booleans as integers.
            is_usable = type(value) in types and not (field in POSITIVE_FACTS and value <= 0)
        if not is_usable:
            raise ValueError(f"has no usable {field}: {value!r:.100}")
    for field in ("keys", "jobs", "plugin_code"):
        if field not in FIELDS[name]:
            continue
        values = content.get(field) or []
        if isinstance(values, dict):
            values = values.values()
        if not all_text(values):
            raise ValueError(f"has no usable {field}: every value must be text")
    if name == SweepFile.RECORD:
        for run, words in (content.get("runs") or {}).items():
            if not is_below(run) or not isinstance(words, list) or not all_text(words):
                raise ValueError("has no usable runs: must map directory names to overrides")


def all_text(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def is_below(name: str) -> bool:
    """Return whether `name` is the relative path of a directory below the directory of a sweep."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute():
        return False
    # A forged sweep.json must not read files outside of its directory.
    return ".." not in path.parts and "\0" not in name


def read_changes(run: Path) -> list[dict[str, Any]]:
    """Read changes.jsonl, the changes of a run's config; return [] if the file is missing.

    A change is a dict such as {"step": 3, "changes": {"seed": [0, 1]}}, where [0, 1] are the old
    and the new value of the key `seed`. Raises CheckpointError if a line is invalid.
    """
    file = run / RunFile.CHANGES
    lines = []
    with readable(file), suppress(FileNotFoundError, NotADirectoryError):
        for text in read_lines(file):
            line = parse_json(text)
            if not is_change(line):
                raise ValueError("contains a line without a valid `step` and `changes`")
            lines.append(line)
    return lines


def is_change(line: Any) -> bool:
    """Return whether a parsed line of changes.jsonl has valid types; see `read_changes`."""
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return False
    changes = line.get("changes")
    if not isinstance(changes, dict):
        return False
    return all(isinstance(pair, list) and len(pair) == 2 for pair in changes.values())


def metrics_lines(run: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the lines of a run's metrics.jsonl, oldest first; None for an invalid line.

    An incomplete last line is ignored, because a running process may still write this line. A
    missing file has no lines. Raises CheckpointError if the file cannot be read.
    """
    file = run / RunFile.METRICS
    with readable(file), suppress(FileNotFoundError, NotADirectoryError):
        for text in read_lines(file):
            line = read_metrics_line(text)
            if line is not None or text.endswith("\n"):
                yield line


def logged_lines(run: Path, last_step: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of `metrics_lines`, up to training step `last_step`."""
    for line in metrics_lines(run):
        if line is None:
            continue
        if last_step is not None and line["step"] > last_step:
            return
        yield line


def read_metrics_line(text: str) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl as a dict with "step", "tokens" and metrics by name.

    A metric becomes None if it is not finite or if its magnitude exceeds LARGEST. Return None for
    an invalid line.
    """
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    types = {type(value) for value in line.values()}
    if not types <= {int, float, NoneType}:
        return None
    counts = {}
    for name in ("step", "tokens"):
        count = line.get(name)
        # Larger integers are not exact in float64.
        if type(count) is not int or not 0 <= count < 2**53:
            return None
        counts[name] = count
    metrics = {name: finite(value) for name, value in line.items()}
    # `finite` makes floats of all numbers, but these counts are integers.
    return {**metrics, **counts}
