"""The arms of a study as far as they have been run, and the numbers that decide."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffllm.compare.report.rows import run_value
from diffllm.compare.report.runs import Run, load_run
from diffllm.compare.study.file import OF_THE_SUMMARY, Rule, Study
from diffllm.compare.study.planned_runs import Planned, is_ended
from diffllm.core.errors import ConfigError
from diffllm.metrics.records import finite
from diffllm.metrics.table import metric_of
from diffllm.statistics.estimates import Estimate, Times, estimate


@dataclass
class StudyArm:
    """An arm of a study, as far as it has been run."""

    name: str
    lr: float | None
    runs: list[Run] = field(default_factory=list)
    """Runs that have ended, seed by seed."""
    values: dict[int, float | None] = field(default_factory=dict)
    """The metric by seed; None where that seed diverged."""
    missing: list[str] = field(default_factory=list)
    """Names of runs that have not ended."""

    @property
    def diverged(self) -> int:
        return sum(run.final_loss is None for run in self.runs)

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values.values() if value is not None]

    @property
    def mean(self) -> Estimate | None:
        return estimate(self.finite) if self.finite else None


def read_seed(study: Study, arm: StudyArm, seed: int, planned: list[Planned], out: Path) -> None:
    """Read what has ended of an arm's runs with one seed, and their number once all have."""
    missing = [run.name for run in planned if not is_ended(out / run.name)]
    runs = [load_run(out / run.name) for run in planned if run.name not in missing]
    arm.missing += missing
    arm.runs += runs
    if not missing:
        arm.values[seed] = value_of(runs, study)


def value_of(runs: list[Run], study: Study) -> float | None:
    """The number of a seed that rules are about, None where it diverged; raises ConfigError for one
    without a logarithm."""
    run = runs[0]
    if study.lr_sweep:
        value = lr_sensitivity([each.final_loss for each in runs], run.cfg.model.vocab_size)
    else:
        value = None if run.final_loss is None else number_of(run, study.metric)
    if value is None or study.scale == "linear":
        return value
    if value <= 0:
        raise ConfigError(f"{run.path}: {study.metric}={value:g} has no logarithm")
    return math.log(value)


def number_of(run: Run, name: str) -> float | None:
    """Return the final number of a run: of its summary, as in report.csv, or the last logged one.

    Returns None if it is not finite; raises ConfigError if it was not logged.
    """
    if run.summary and name in run.summary:
        return finite(run.summary[name])
    metric = None if name in OF_THE_SUMMARY else metric_of(name)
    if metric and metric.column:
        value = run_value(run, metric)
    else:
        values = run.series(name).values
        value = float(values[-1]) if len(values) else None
    if value is None:
        raise ConfigError(f"{run.path} has no {name}")
    return value if math.isfinite(value) else None


def lr_sensitivity(losses: Sequence[float | None], vocab_size: int) -> float | None:
    """Return what a learning rate other than the best one costs, in nats per token; None if all
    diverged.

    It is the mean over learning rates of min(loss, initial loss) - best loss, as in Wortsman et
    al., "Small-scale proxies for large-scale Transformer training instabilities"
    (arXiv:2309.14322). A diverged run counts as one that learned nothing.

    Args:
        losses: final held-out loss at each learning rate; None if the run diverged.
        vocab_size: its logarithm is the loss of a model that has learned nothing.
    """
    initial = math.log(vocab_size)
    finite = [loss for loss in losses if loss is not None]
    if not finite:
        return None
    capped = [initial if loss is None else min(loss, initial) for loss in losses]
    return sum(capped) / len(capped) - min(*finite, initial)


def times_of(study: Study, arm: StudyArm, rule: Rule) -> Times:
    """Read when the runs of an arm reached the level of a log-rank rule."""
    assert rule.reaches is not None
    found = []
    for run in arm.runs:
        when = run.reached(study.metric, rule.reaches)
        if when is None:
            raise ConfigError(f"{run.path} has no {study.metric}")
        found.append(when)
    return Times.of(found)


def fact_values(arms: list[StudyArm], name: str) -> list[str]:
    """Return the distinct values of a fact over all runs; empty if no run records the fact."""
    facts = [run.facts for arm in arms for run in arm.runs]
    if name == "python":
        facts = [each.get("environment") or {} for each in facts]
    return sorted({str(each[name]) for each in facts if each.get(name) is not None})


def arm_numbers(arm: StudyArm) -> dict[str, Any]:
    """An arm's numbers as JSON values."""
    mean = arm.mean
    first = arm.runs[0] if arm.runs else None
    return {
        "variant": first and first.variant,
        "parameters": first and first.facts.get("parameters"),
        "flops_per_token": first and first.facts.get("flops_per_token"),
        "tokens": first and first.cfg.steps * first.cfg.global_batch_size * first.cfg.seq_len,
        "rates": sorted({run.cfg.optim.lr for run in arm.runs}),
        "lr": arm.lr,
        "mean": mean and mean.mean,
        "low": mean and mean.low,
        "high": mean and mean.high,
        "values": {str(seed): value for seed, value in arm.values.items()},
        "losses": {run.path.name: run.final_loss for run in arm.runs},
        "diverged": arm.diverged,
        "missing": arm.missing,
    }
