"""The number of a run that a study decides by."""

import math

from diffllm.compare.report.numbers import finite
from diffllm.compare.report.rows import of_run
from diffllm.compare.report.runs import Run
from diffllm.compare.study.sensitivity import LR_SENSITIVITY
from diffllm.core.errors import ConfigError
from diffllm.metrics.table import METRICS, metric_of

OF_THE_SUMMARY = ("heldout_loss", "heldout_bits_per_byte", "train_loss", "tokens_per_s", "seconds")
"""Numbers of summary.json that are no logged metrics."""


def check_metric(name: str) -> None:
    """Raise ConfigError for a name that no run has a number for."""
    if name in OF_THE_SUMMARY:
        return
    if name == LR_SENSITIVITY:
        raise ConfigError(f"metric={name} takes lr_sweep: learning rates at which all arms run")
    try:
        metric_of(name)
    except KeyError:
        known = [*OF_THE_SUMMARY, *(metric.quantity for metric in METRICS if metric.column)]
        raise ConfigError(f"metric={name} is none of {', '.join(known)}") from None


def number_of(run: Run, name: str) -> float | None:
    """The number that a finished run ended with: of its summary, or as report.csv has it, else the
    last that was logged. None where it is not finite; raises ConfigError where it was not logged.
    """
    if run.summary and name in run.summary:
        return finite(run.summary[name])
    metric = None if name in OF_THE_SUMMARY else metric_of(name)
    if metric and metric.column:
        value = of_run(run, metric)
    else:
        values = run.series(name).values
        value = float(values[-1]) if len(values) else None
    if value is None:
        raise ConfigError(f"{run.path} has no {name}")
    return value if math.isfinite(value) else None
