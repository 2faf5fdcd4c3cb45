"""Arms of a study: their ended runs, and the number of every seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diffllm.compare.report.rows import run_value
from diffllm.compare.report.runs import Run
from diffllm.compare.study.file import OF_THE_SUMMARY, Rule, Study
from diffllm.core.errors import ConfigError
from diffllm.metrics.records import finite
from diffllm.metrics.table import metric_of
from diffllm.statistics.estimates import Estimate, Times, estimate


@dataclass
class StudyArm:
    name: str
    lr: float | None
    runs: list[Run] = field(default_factory=list)
    values: dict[int, float | None] = field(default_factory=dict)
    """By seed; None if it diverged."""
    missing: list[str] = field(default_factory=list)

    @property
    def diverged(self) -> int:
        return sum(run.final_loss is None for run in self.runs)

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values.values() if value is not None]

    @property
    def mean(self) -> Estimate | None:
        return estimate(self.finite) if self.finite else None


def value_of(runs: list[Run], study: Study) -> float | None:
    """Return the number of a seed; None if it diverged. Raises ConfigError."""
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
    """Return the final number of a run; None if not finite. Raises ConfigError if not logged."""
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
    """Return the mean over learning rates of min(loss, initial loss) - best loss, nats per token.

    From Wortsman et al. (arXiv:2309.14322). A diverged run counts as one that learned nothing; None
    if all diverged. The initial loss is the logarithm of the vocabulary's size.
    """
    initial = math.log(vocab_size)
    finite = [loss for loss in losses if loss is not None]
    if not finite:
        return None
    capped = [initial if loss is None else min(loss, initial) for loss in losses]
    return sum(capped) / len(capped) - min(*finite, initial)


def times_of(study: Study, arm: StudyArm, rule: Rule) -> Times:
    assert rule.reaches is not None
    return Times.of(run.reached(study.metric, rule.reaches) for run in arm.runs)


def arm_numbers(arm: StudyArm) -> dict[str, Any]:
    mean, first = arm.mean, arm.runs[0] if arm.runs else None
    return {
        "variant": first and first.variant,
        **{fact: first and first.facts.get(fact) for fact in ("parameters", "flops_per_token")},
        "tokens": first and first.planned_tokens,
        "rates": sorted({run.cfg.optim.lr for run in arm.runs}),
        "lr": arm.lr,
        **{name: mean and getattr(mean, name) for name in ("mean", "low", "high")},
        "values": {str(seed): value for seed, value in arm.values.items()},
        "losses": {run.path.name: run.final_loss for run in arm.runs},
        "diverged": arm.diverged,
        "missing": arm.missing,
    }
