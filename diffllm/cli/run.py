"""Train a run, evaluate its tasks and write its report, from a command line or from Python."""

import signal
from pathlib import Path
from typing import Any

from diffllm.compare.report import write_report
from diffllm.config import TrainConfig
from diffllm.config.compose import checked
from diffllm.core.errors import ConfigError
from diffllm.evaluation.suite import tasks_of
from diffllm.training.run import Outcome, run


def run_and_report(cfg: TrainConfig) -> Outcome:
    """Train a run, evaluate its tasks and write its report; all ranks must call this function.

    Raises UserError for errors that the user can fix, such as an invalid config.
    """
    return run(cfg, tasks_of(cfg), report_on if cfg.run.report else None)


def report_on(path: Path) -> str:
    try:
        return str(write_report([path])[0])
    except Exception as error:
        # The run itself has succeeded, so its exit code must not depend on the report.
        return f"not written: {error!r}"


class Stopped(KeyboardInterrupt):
    """Raised after a signal has stopped training and a checkpoint has been saved.

    `number` is the signal, such as signal.SIGTERM. Stopped is a KeyboardInterrupt, so that the
    signal also ends a notebook cell or a loop that trains several configs.
    """

    def __init__(self, number: signal.Signals):
        super().__init__(f"stopped by {number.name}; the same config resumes the run")
        self.number = number


def train(cfg: TrainConfig) -> dict[str, Any]:
    """Start or resume a run in this process, like `diffllm train` with the same config.

    Under torchrun every rank must call this function; all ranks return the same summary. In the
    main thread, Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint and then raise Stopped. Other threads
    do not handle signals.

    Returns:
        The content of summary.json: "heldout_loss", "heldout_bits_per_byte", "train_loss", "steps",
        "diverged", "sample" and others. If the run has already finished, the stored summary is
        returned. If training diverged, losses that are not finite are None.

    Raises:
        UserError: an error that the user can fix, such as an invalid config.
        Stopped: a signal stopped training.
    """
    if not isinstance(cfg, TrainConfig):
        raise ConfigError(f"train needs a config from load_config, not {cfg!r}")
    outcome = run_and_report(checked(cfg))
    if outcome.summary is None:
        assert outcome.stopped
        raise Stopped(outcome.stopped)
    return outcome.summary
