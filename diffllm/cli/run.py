"""One run with its tasks and its report, for `diffllm train` and, from Python, `diffllm.train`."""

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
    """Run a config in every process of a launch; raises UserError as `run` does."""
    return run(cfg, tasks_of(cfg), report_on if cfg.run.report else None)


def report_on(path: Path) -> str:
    try:
        return str(write_report([path])[0])
    except Exception as error:
        return f"not written: {error!r}"


class Stopped(KeyboardInterrupt):
    """A signal, `number`, has ended training; what was trained is saved.

    As Ctrl-C does elsewhere, it ends a notebook's cell and a loop over configs.
    """

    def __init__(self, number: signal.Signals):
        super().__init__(f"stopped by {number.name}; the same config continues the run")
        self.number = number


def train(cfg: TrainConfig) -> dict[str, Any]:
    """Run what `diffllm train` would run with this config, or continue it, in this process.

    Under torchrun every rank calls it, and gets the same answer. In the main thread Ctrl-C, SIGTERM
    and SIGUSR1 save first; in another one no signal is handled.

    Returns:
        The content of summary.json: "heldout_loss", "heldout_bits_per_byte", "train_loss", "steps",
        "diverged", "sample" and others; of a run that has ended already, too. A run that diverged
        has None in place of a loss that is not finite.

    Raises:
        UserError: something outside the code is wrong, such as a config that cannot run.
        Stopped: a signal came; a KeyboardInterrupt.
    """
    if not isinstance(cfg, TrainConfig):
        raise ConfigError(f"train takes a config, which load_config returns, not {cfg!r}")
    outcome = run_and_report(checked(cfg))
    if outcome.summary is None:
        assert outcome.stopped
        raise Stopped(outcome.stopped)
    return outcome.summary
