"""Destinations of metrics: metrics.jsonl, wandb and TensorBoard, with the same metric names."""

import contextlib
import importlib.util
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.files import open_to_append, read_lines, readable, write_atomic
from diffllm.core.printing import to_stderr
from diffllm.metrics.table import metric_of
from diffllm.metrics.wandb_run import WandbRun


@dataclass
class MetricsConfig:
    """Optional destinations of metrics, in addition to metrics.jsonl and wandb."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run directory's `tensorboard/`."""


def check_installed(cfg: MetricsConfig) -> None:
    if cfg.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "metrics.tensorboard=true needs a package; run "
            "pip install -c constraints.txt -e '.[tensorboard]'"
        )


class EventFiles:
    """TensorBoard event files of a run. After an error, training continues without event files.

    `last_step` is the step from which the run resumes, or 0 for a new run. TensorBoard hides values
    that an earlier process of the run logged for steps after `last_step`.
    """

    def __init__(self, directory: Path, last_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer: SummaryWriter | None = None
        with self._guarded():
            self.writer = SummaryWriter(str(directory), purge_step=last_step + 1)

    def log(self, values: dict[str, Any]) -> None:
        with self._guarded():
            for name, value in values.items():
                if self.writer and name != "step":
                    self.writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        with self._guarded():
            if self.writer:
                self.writer.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a write can fail later, in the writer's thread
            self.writer = None
            to_stderr(f"warning: TensorBoard event files stopped, training continues: {error!r}")


class MetricsFile:
    """The file metrics.jsonl, with one JSON object per line.

    `last_step` is the step from which the run resumes, or 0 for a new run. Lines of later steps and
    incomplete lines are removed. If writing fails, for example on a full disk, new lines are kept
    in memory and written later. Raises CheckpointError if the file cannot be created.
    """

    def __init__(self, path: Path, last_step: int = 0):
        kept = []
        if last_step:
            with readable(path), contextlib.suppress(FileNotFoundError):
                for line in read_lines(path):
                    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                        if json.loads(line)["step"] <= last_step:
                            kept.append(line.rstrip("\n") + "\n")
        write_atomic(path, "".join(kept))
        self.path = path
        try:
            self.file = os.fdopen(open_to_append(path), "ab", buffering=0)
            self.size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
        self.waiting: list[bytes] = []

    def write(self, values: dict[str, Any]) -> None:
        """Append `values` as one line of JSON; NaN and infinity become null."""
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        known = len(self.waiting)
        self.waiting.append(json.dumps(finite).encode() + b"\n")
        problem = self._write_waiting()
        if problem and not known:
            to_stderr(f"warning: cannot write {self.path}, lines are kept in memory: {problem}")

    def _write_waiting(self) -> str | None:
        """Write the lines kept in memory; return the reason if writing fails, otherwise None."""
        while self.waiting:
            line = self.waiting[0]
            try:
                if self.file.write(line) != len(line):
                    raise OSError("the last line was written only in part; free some disk space")
            except OSError as error:
                with contextlib.suppress(OSError):
                    self.file.truncate(self.size)  # remove an incomplete line
                return error.strerror or str(error)
            self.size += len(line)
            self.waiting.pop(0)
        return None

    def close(self) -> None:
        """Try again to write the lines kept in memory, then close the file."""
        if problem := self._write_waiting():
            lost = len(self.waiting)
            to_stderr(f"warning: the last {lost} lines of {self.path} were not written: {problem}")
        self.file.close()


class Sinks(NamedTuple):
    """Destinations of metrics, used on rank 0 only. `events` is None without TensorBoard."""

    file: MetricsFile
    wandb: WandbRun
    events: EventFiles | None = None

    def write(self, step: int, tokens: int, values: dict[str, float]) -> None:
        """Log the metrics `values` of optimizer step `step` to all destinations.

        `tokens` is the number of tokens trained so far. Raises ConfigError for a metric that
        diffllm/metrics/table.py does not define.
        """
        for name in values:
            metric_of(name)
        line = {"step": step, "tokens": tokens, **values}
        self.file.write(line)
        self.wandb.log(line)
        if self.events:
            self.events.log(line)

    def close(self) -> None:
        self.file.close()
        if self.events:
            self.events.close()
