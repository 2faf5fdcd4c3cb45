"""Write, read and check manifest.json and state.json, the JSON files of a checkpoint.

manifest.json contains the size and SHA-256 checksum of every other file, to detect damage.
state.json contains the training state that is not stored in tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffllm.core.errors import CheckpointError
from diffllm.core.files import read_json, sync
from diffllm.core.run_files import COMPLETE, INCOMPLETE, step_of
from diffllm.data.mixture_order import check_place
from diffllm.metrics.spikes import SpikeMonitor
from diffllm.metrics.visible_keys import VisibleKeys
from diffllm.metrics.wandb_config import RUN_ID

if TYPE_CHECKING:
    from torch import Tensor


FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
REQUIRED = (".metadata", STATE)
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """Expected size in bytes and expected SHA-256 checksum of one checkpoint file."""

    size: int
    sha256: str


Manifest = dict[str, FileRecord]


def file_records(files: Iterable[Path]) -> Manifest:
    records = {}
    for file in files:
        records[file.name] = FileRecord(file.stat().st_size, sha256_of(file))
    return records


def sha256_of(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def complete(path: Path, step: int, state: str, files: Manifest) -> None:
    """Write state.json and manifest.json into the checkpoint directory `path`.

    `state` is the content of state.json. `files` contains the size and checksum of each tensor
    file, by file name.
    """
    # The files must be on disk before the caller renames the directory to its final name.
    (path / STATE).write_text(state, encoding="utf-8")
    sync(path / STATE)
    # The manifest last: it contains the checksums of all other files.
    write_manifest(path, step, files | file_records(path / name for name in REQUIRED))


def write_manifest(path: Path, step: int, manifest: Manifest) -> None:
    files = {}
    for name, record in sorted(manifest.items()):
        files[name] = vars(record)
    content = {"format": FORMAT, "step": step, "files": files}
    (path / MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")
    sync(path / MANIFEST)


def read_manifest(path: Path) -> Manifest:
    """Read manifest.json; return the expected size and checksum of each file by file name.

    Raises CheckpointError if `path` is not a checkpoint directory, or if manifest.json is invalid.
    """
    if not os.path.lexists(path / MANIFEST):
        raise CheckpointError(f"{path} is not a checkpoint: {MANIFEST} is missing")
    with reading(path, MANIFEST) as content:
        return manifest_from(content)


@contextmanager
def reading(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Read the JSON file `path / name` of a checkpoint, and yield the content to a `with` block.

    Raises CheckpointError if the file is missing or invalid, and if the `with` block raises
    ValueError or OSError.
    """
    try:
        content = read_json(path / name)
        if content.get("format") != FORMAT:
            raise ValueError(f"does not have format {FORMAT}, which this version reads")
        step = content.get("step")
        # A renamed directory would otherwise pass as a checkpoint of another step.
        has_step_name = COMPLETE.fullmatch(path.name) or INCOMPLETE.fullmatch(path.name)
        # `type`, not `isinstance`: JSON's true is an int in Python.
        if type(step) is not int or step < 0:
            raise ValueError("has no valid step")
        if has_step_name and step != step_of(path):
            raise ValueError(f"has step {step}, but the directory name has {step_of(path)}")
        yield content
    except (ValueError, OSError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            problem = f"cannot be read ({error.strerror})"
        raise CheckpointError(f"{path} is not a checkpoint: {name} {problem}") from error


def manifest_from(content: dict[str, Any]) -> Manifest:
    """Return the size and checksum of each file that a parsed manifest.json lists, by file name.

    Raises ValueError if an entry is missing or invalid.
    """
    entries = content.get("files")
    if not isinstance(entries, dict):
        raise ValueError("has no files")
    files = {}
    for name, entry in entries.items():
        # A forged manifest could name a file outside of the checkpoint.
        is_file_name = name == os.path.basename(name) and "\0" not in name
        if not is_file_name or name in ("", ".", "..", MANIFEST):
            raise ValueError(f"lists {shown(name)}, which cannot be a file of a checkpoint")
        record = entry if isinstance(entry, dict) else {}
        size = record.get("size")
        digest = record.get("sha256")
        if type(size) is not int or size < 0 or not SHA256.fullmatch(str(digest)):
            raise ValueError(f"has no valid size and checksum of {shown(name)}")
        files[name] = FileRecord(size, str(digest))
    if not files.keys() >= set(REQUIRED):
        raise ValueError(f"does not list {' and '.join(REQUIRED)}")
    return files


def verify(path: Path, checksums: bool = True) -> list[str]:
    """Compare the files in a checkpoint directory with manifest.json.

    Return one error message per missing or damaged file. If manifest.json itself is missing or
    invalid, return one message about manifest.json and check no other file. If `checksums` is
    False, compare file sizes only.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error).removeprefix(f"{path} is not a checkpoint: ")]
    # Threads are enough, because hashing releases the GIL.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        problems = pool.map(lambda name: fault(path / name, manifest[name], checksums), manifest)
        return [problem for problem in problems if problem]


def fault(file: Path, record: FileRecord, checksum: bool) -> str | None:
    """Return an error message if `file` is missing or differs from `record`; None otherwise.

    If `checksum` is False, compare the file size only.
    """
    name = shown(file.name)
    try:
        # Not `stat`: a link could lead to a file outside of the checkpoint.
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file"
        # The size first, because it needs no read of the file.
        if status.st_size != record.size:
            return f"{name} has {status.st_size:,} bytes, not {record.size:,}"
        if checksum and sha256_of(file) != record.sha256:
            return f"{name} has a wrong checksum"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


def shown(text: object) -> str:
    """Return the first 100 characters of `text`, with "?" for each unprintable character."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:100])


STATE_ENTRIES = {"ranks": (int,), "parameters": (dict,), "loop": (dict, type(None))}
"""Types of entries in state.json. If `loop` is null, the checkpoint contains only parameters."""


def faults(path: Path, checksums: bool = True) -> list[str]:
    """Compare the files in a checkpoint directory with manifest.json, and check state.json.

    Return one error message per problem. The content of state.json is checked only if all files
    match. If `checksums` is False, compare only the file sizes with manifest.json.
    """
    problems = verify(path, checksums)
    if problems:
        return problems
    try:
        check_loop(path, read_state(path))
    except CheckpointError as error:
        return [str(error).removeprefix(f"{path} is not a checkpoint: ")]
    return []


def read_state(path: Path) -> dict[str, Any]:
    """Return the parsed state.json of the checkpoint directory `path`.

    Raises CheckpointError if the file is missing or invalid.
    """
    with reading(path, STATE) as state:
        for name, kinds in STATE_ENTRIES.items():
            if name not in state or type(state[name]) not in kinds:
                raise ValueError(f"has no valid {name}")
        if state["ranks"] < 1:
            raise ValueError("has no valid ranks")
        return state


def check_loop(path: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if `state` lacks a valid value that is required to resume training.

    `state` is the parsed state.json of the checkpoint directory `path`; these values are in
    `state["loop"]`. If `state["loop"]` is None, the checkpoint contains only parameters, and no
    error is raised.
    """
    loop = state["loop"]
    if loop is None:
        return
    step = loop.get("step")
    run_id = loop.get("wandb_id")
    is_valid_run_id = run_id is None or RUN_ID.fullmatch(str(run_id)) is not None
    mode = loop.get("mkl_mode")
    seconds = loop.get("seconds")
    # Older checkpoints lack tokens, train_seconds, training_flops and visible_keys.
    train_seconds = loop.get("train_seconds", seconds)
    flops = loop.get("training_flops")
    is_valid = {
        "step": type(step) is int and step == state["step"],
        "data": passes(check_place, loop.get("data")),
        "order": isinstance(loop.get("order"), dict),
        "spikes": passes(check_spikes, loop.get("spikes")),
        "visible_keys": passes(VisibleKeys.of, loop.get("visible_keys", {})),
        "tokens": passes(tokens_of, loop),
        "training_flops": flops is None or is_number_below(math.inf, flops),
        "wandb_id": "wandb_id" in loop and is_valid_run_id,
        "compiled": type(loop.get("compiled", 0)) in (bool, type(None)),
        "mkl_mode": type(mode) is str and mode.isprintable() and len(mode) <= 1000,
        "seconds": is_number_below(2**63, seconds),
        "train_seconds": is_number_below(2**63, train_seconds),
    }
    for name, is_valid_entry in is_valid.items():
        if not is_valid_entry:
            raise CheckpointError(
                f"{path} is not a checkpoint: loop.{name} in state.json is missing or invalid"
            )


def is_number_below(bound: float, value: Any) -> bool:
    """Return whether `value` is a number from 0 to below `bound`; a bool or NaN is not."""
    return type(value) in (int, float) and bool(0 <= value < bound)


def tokens_of(loop: Mapping[str, Any]) -> int:
    """Return the training tokens up to a checkpoint; `loop` is an entry of its state.json.

    Raises KeyError or ValueError for invalid entries.
    """
    if "tokens" in loop:
        factors = [loop["tokens"]]
    else:
        # Older versions counted every step with the newest batch.
        order = loop["order"]
        factors = [loop["step"], order.get("global_batch_size", 0), order.get("seq_len", 0)]
    if any(type(factor) is not int for factor in factors):
        raise ValueError("has no valid number of tokens")
    tokens = math.prod(factors)
    if not 0 <= tokens < 2**63:
        raise ValueError("has no valid number of tokens")
    return tokens


def passes(check: Callable[[Any], Any], value: Any) -> bool:
    try:
        check(value)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return False
    return True


def check_spikes(values: Any) -> None:
    if not isinstance(values, dict) or not numbers_only(values):
        raise ValueError("is not the state of a SpikeMonitor")
    # Use the state once: a forged state may fail only in a later computation.
    monitor = SpikeMonitor()
    monitor.load_state_dict(values)
    monitor.update(1.0, 1.0)
    monitor.metrics()


def numbers_only(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(numbers_only, value.values()))
    if isinstance(value, list):
        return all(map(numbers_only, value))
    return value is None or type(value) in (int, float)


def check_parameters(path: Path, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a checkpoint and a model differ in parameter names or shapes.

    `state` is the parsed state.json of the checkpoint directory `path`. `params` contains the
    parameters of the model, by name.
    """
    saved = state["parameters"]
    shapes = {name: list(param.shape) for name, param in params.items()}
    for name in sorted(saved.keys() | shapes.keys()):
        if saved.get(name) != shapes.get(name):
            raise CheckpointError(
                f"{path} is a checkpoint of a different model: {shown(name)} is "
                f"{shown(saved.get(name, 'absent'))} in the checkpoint and "
                f"{shapes.get(name, 'absent')} in the model; use the model settings of the "
                "checkpoint"
            )
