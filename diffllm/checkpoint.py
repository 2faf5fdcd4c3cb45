"""Checkpoints: tensors through DCP, everything else as JSON, visible only when complete.

`checkpoints/step-00000100/` holds DCP's files and `state.json`. It is written under a hidden name
and renamed at the end, so a directory with the visible name is complete.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from diffllm.checkpoint_reader import TensorReader
from diffllm.errors import CheckpointError, ConfigError

FORMAT = 1


@dataclass
class CheckpointConfig:
    """When checkpoints are written and how many stay."""

    interval: int = 100
    """Steps between checkpoints; the last step always has one."""
    keep_last: int = 2
    """Newest checkpoints that stay; 0 keeps all."""

    def validate(self) -> None:
        """Raise ConfigError for values outside their range."""
        if self.interval < 1:
            raise ConfigError(f"checkpoint.interval={self.interval} must be at least 1")
        if self.keep_last < 0:
            raise ConfigError(f"checkpoint.keep_last={self.keep_last} must not be negative")


def step_of(path: Path) -> int:
    """The step in a checkpoint directory's name."""
    return int(path.name.removeprefix("step-"))


def complete_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints below `directory`, oldest first."""
    found = (p for p in directory.glob("step-*") if re.fullmatch(r"step-\d+", p.name))
    return sorted((p for p in found if (p / "state.json").is_file()), key=step_of)


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint; raises CheckpointError if it is not one of ours."""
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of format {FORMAT}")
    parts = {"step": int, "parameters": dict}
    for name, kind in parts.items():
        if not isinstance(state.get(name), kind):
            raise CheckpointError(f"{path} is not a checkpoint: state.json has no {name}")
    return state


def check_parameters(path: Path, params: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the checkpoint holds just these parameters and shapes."""
    saved = read_state(path)["parameters"]
    here = {name: list(param.shape) for name, param in params.items()}
    if saved == here:
        return
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise CheckpointError(
                f"{path} is a checkpoint of another model: {name} is "
                f"{saved.get(name, 'absent')} there and {here.get(name, 'absent')} here"
            )


def load_tensors(path: Path, tensors: dict[str, Tensor], **kwargs: Any) -> None:
    """Fill `tensors` in place from a checkpoint, whatever mesh wrote it.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(tensors, storage_reader=TensorReader(path), **kwargs)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """One line about a failure; DCP wraps those of the ranks, and not in an Exception."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Checkpointer:
    """Writes checkpoints of one run in the background, one at a time.

    Every rank makes one and calls the same methods at the same steps.
    """

    def __init__(self, directory: Path, cfg: CheckpointConfig):
        self.directory, self.cfg = directory, cfg
        # DCP's background collectives must not meet the training's on one group.
        self.group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[Any] | None = None

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Start writing; returns once the tensors are copied. Waits for an earlier save."""
        self.wait()
        hidden = self.directory / f".step-{step:08d}.incomplete"
        if self.rank == 0:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
        dist.barrier(group=self.group)
        written = dcp.async_save(tensors, checkpoint_id=hidden, process_group=self.group)
        assert isinstance(written, Future)
        self.pending = written
        if self.rank == 0:
            self.pending = self.pool.submit(self._publish, written, hidden, step, state)

    def _publish(
        self, written: Future[Any], hidden: Path, step: int, state: dict[str, Any]
    ) -> None:
        written.result()
        with open(hidden / "state.json", "w") as file:
            json.dump({"format": FORMAT, "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        final = self.directory / f"step-{step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        hidden.rename(final)
        if self.cfg.keep_last:
            for old in complete_checkpoints(self.directory)[: -self.cfg.keep_last]:
                shutil.rmtree(old)

    def wait(self) -> None:
        """Wait until the save under way is complete; raises CheckpointError if it failed."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"could not write a checkpoint under {self.directory}: {reason(error)}"
            ) from error

    def close(self) -> None:
        """Wait for the last save."""
        self.wait()
        self.pool.shutdown()
