"""Destinations of metrics: metrics.jsonl, steps.npy, wandb and TensorBoard, with equal names.

Events are written to events.jsonl and wandb.
"""

import contextlib
import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffllm.core.errors import ConfigError
from diffllm.core.files import read_lines, readable
from diffllm.core.keys import key
from diffllm.core.printing import to_stderr
from diffllm.metrics.events import Event, EventsFile
from diffllm.metrics.growing_file import GrowingFile
from diffllm.metrics.panels import tensorboard_layout
from diffllm.metrics.steps import StepsFile, step_values
from diffllm.metrics.table import COST_AXES, metric_of
from diffllm.metrics.wandb_run import WandbRun


@dataclass
class MetricsConfig:
    """Optional destinations of metrics, in addition to metrics.jsonl and wandb."""

    tensorboard: bool = key(
        False,
        effect="speed",
        help="Write TensorBoard event files into the run directory's `tensorboard/`.",
    )


def check_installed(cfg: MetricsConfig) -> None:
    if cfg.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "metrics.tensorboard=true needs a package; run "
            "pip install -c constraints.txt -e '.[tensorboard]'"
        )


class TensorBoardFiles:
    """TensorBoard event files of a run. After an error, training continues without event files.

    The tab "Custom Scalars" has the sections and figures of the report, without the gaps.

    `last_step` is the step from which the run resumes, or 0 for a new run. TensorBoard hides values
    that an earlier process of the run logged for steps after `last_step`.
    """

    def __init__(self, directory: Path, last_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer: SummaryWriter | None = None
        with self._guarded():
            self.writer = SummaryWriter(str(directory), purge_step=last_step + 1)
            self.writer.add_custom_scalars(tensorboard_layout())

    def log(self, step: int, values: dict[str, Any]) -> None:
        with self._guarded():
            for name, value in values.items():
                if self.writer:
                    self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        with self._guarded():
            if self.writer:
                self.writer.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # The writer's thread stores any exception, and a later call raises it.
            self.writer = None
            to_stderr(f"warning: TensorBoard event files stopped, training continues: {error!r}")


class MetricsFile:
    """The file metrics.jsonl, with one JSON object per line.

    `last_step` is the step from which the run resumes, or 0 for a new run. Lines of later steps and
    incomplete lines are removed. Raises CheckpointError if the file cannot be created.
    """

    def __init__(self, path: Path, last_step: int = 0):
        lines = []
        if last_step:
            with readable(path), contextlib.suppress(FileNotFoundError):
                for line in read_lines(path):
                    # A kill or a full disk may have cut the line.
                    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                        if json.loads(line)["step"] <= last_step:
                            lines.append(line.rstrip("\n") + "\n")
        self.file = GrowingFile(path, "".join(lines).encode(), "lines")

    def write(self, values: dict[str, Any]) -> None:
        """Append `values` as one line of JSON; NaN and infinity become null."""
        content = dict(values)
        for name, value in values.items():
            # JSON has no NaN and no infinity.
            if isinstance(value, float) and not math.isfinite(value):
                content[name] = None
        self.file.append(json.dumps(content).encode() + b"\n")

    def close(self) -> None:
        self.file.close()


class Sinks(NamedTuple):
    """Destinations of metrics and events, used on rank 0 only."""

    file: MetricsFile
    steps: StepsFile
    events: EventsFile
    wandb: WandbRun
    tensorboard: TensorBoardFiles | None = None

    def write(self, rows: np.ndarray, values: dict[int, dict[str, float]]) -> None:
        """Log consecutive optimizer steps to all destinations.

        steps.npy, wandb and TensorBoard receive every step, and metrics.jsonl the steps with
        additional metrics.

        Args:
            rows: the steps, (n,) of dtype STEP_DTYPE.
            values: additional metrics by step.

        Raises ConfigError for a metric that diffllm/metrics/table.py does not define.
        """
        self.steps.append(rows)
        for row in step_values(rows):
            logged = values.get(row["step"], {})
            # `metric_of` raises ConfigError for an unknown metric.
            for name in logged:
                metric_of(name)
            axes = {name: row.pop(name) for name in COST_AXES}
            if logged:
                self.file.write({**axes, **logged})
            self.wandb.log({**axes, **row, **logged})
            if self.tensorboard:
                self.tensorboard.log(axes["step"], {**row, **logged})

    def write_event(self, event: Event) -> None:
        self.events.write(event)
        self.wandb.add_event(event)

    def close(self) -> None:
        self.file.close()
        self.steps.close()
        self.events.close()
        if self.tensorboard:
            self.tensorboard.close()
