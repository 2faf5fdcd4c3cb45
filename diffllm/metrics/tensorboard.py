"""TensorBoard event files beside metrics.jsonl, with the same names, over steps."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffllm.core.errors import ConfigError
from diffllm.core.printing import to_stderr


@dataclass
class MetricsConfig:
    """Where metrics go besides metrics.jsonl and wandb."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run directory's `tensorboard/`."""


def check_installed(cfg: MetricsConfig) -> None:
    """Raise ConfigError if event files are asked for and tensorboard is not installed."""
    if cfg.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "metrics.tensorboard=true needs the tensorboard package: "
            'pip install "diffllm[tensorboard]"'
        )


class EventFiles:
    """Event files of a run; where they cannot be written, training goes on without.

    Args:
        directory: the folder of the run's event files.
        last_step: where the run continues; TensorBoard hides what was written past it.
    """

    def __init__(self, directory: Path, last_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer: SummaryWriter | None = None
        try:
            self.writer = SummaryWriter(str(directory), purge_step=last_step + 1)
        except OSError as error:
            self._give_up(error)

    def log(self, values: dict[str, Any]) -> None:
        """Write one step's values under their names."""
        if self.writer is None:
            return
        try:
            for name, value in values.items():
                if name != "step":
                    self.writer.add_scalar(name, value, values["step"])
        except Exception as error:  # of the writer's thread, which failed at an earlier line
            self._give_up(error)

    def close(self) -> None:
        """Write what is left."""
        if self.writer is None:
            return
        try:
            self.writer.close()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.writer = None
        to_stderr(f"warning: no more TensorBoard event files, training goes on: {error!r}")
