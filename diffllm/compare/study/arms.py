"""Arms of a study and the measured values of their runs.

An arm is one of the compared configs. Each arm has one run per seed, or, in a study with
`lr_sweep`, one run per seed and learning rate.
"""

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from diffllm.compare.arms.comparable import starting_point
from diffllm.compare.arms.run import Run, Series, run_value
from diffllm.compare.report.curves import LOSS
from diffllm.compare.report.notes import thin_note
from diffllm.compare.study.file import LR_SENSITIVITY, OF_THE_SUMMARY, TASKS, Study
from diffllm.compare.study.planned_runs import (
    Planned,
    change_during_run,
    config_of_planned,
    strayed,
)
from diffllm.compare.study.study_hash import config_digest, is_hashed
from diffllm.compare.study.trend_data import PositionLosses, position_losses
from diffllm.compare.study.unequal import settings_of
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.evaluation.heldout import DocumentLosses, document_losses
from diffllm.metrics.facts import RunFacts, facts_of
from diffllm.metrics.records import finite
from diffllm.metrics.table import metric_of
from diffllm.statistics.estimates import Estimate, Times, estimate

DIGITS = 7
"""Significant digits of stored document losses."""
NONE = Series(np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True, eq=False)
class StudyRun:
    """Measured values of an ended run, from which a verdict is computed."""

    name: str
    seed: int
    lr: float
    loss: float | None
    """Final held-out loss in nats per token; None if the run diverged."""
    value: float | None
    """Final value of the study's metric (for lr_sensitivity, the loss); None if diverged."""
    planned_tokens: int
    vocab_size: int
    curve: Series = NONE
    """Logged metric over training tokens, arrays (n,); NaN if not finite, empty if not logged."""
    documents: DocumentLosses | None = None
    """None if the metric is not the held-out loss, or if the run has no losses of documents."""
    facts: RunFacts = field(default_factory=RunFacts)
    settings: dict[str, str] = field(default_factory=dict)
    """Formatted values of the compared config keys, see `settings_of`."""
    variant: str = ""
    training_flops: float | None = None
    """Measured FLOPs of all training steps; None if unknown."""
    train_seconds: float | None = None
    """Measured seconds of all training steps; None unless the study's budget is in seconds."""
    plugin_code: dict[str, str] = field(default_factory=dict)
    """Hash of the code of each plugin."""
    mark: str = ""
    """Saved config key run.study: the study's hash, the stage and the arm."""
    strayed: str = ""
    """Differences from the planned config; empty without differences."""
    positions: PositionLosses | None = None
    """None unless the metric is position/N."""
    chance: float | None = None
    """Expected share of right answers by guessing; None for metrics other than tasks/*."""
    digest: str = ""
    """The `config_digest` of the saved config."""
    thin: str = ""
    """Warning if there is too little held-out text for a reliable loss; otherwise empty."""

    @property
    def diverged(self) -> bool:
        return self.value is None

    @property
    def conditions(self) -> dict[str, Any]:
        """Settings and other conditions of the run that a verdict compares between the arms.

        Example: {"seq_len": "2,048", "torch": "2.9.0"}.
        """
        found = {**self.settings, **vars(self.facts)}
        if self.documents is not None:
            found["heldout_texts"] = text_hash(self.documents)
        return found

    def reached(self, level: float) -> tuple[float, bool]:
        """Return the training tokens at which the metric first was at least `level`, and True.

        If the metric was never at least `level`, return the training tokens at the last logged
        value, and False. If the run diverged, return the planned training tokens, and False.
        """
        if self.diverged:
            return self.planned_tokens, False
        hit = np.flatnonzero(self.curve.values >= level)
        return int(self.curve.tokens[hit[0] if len(hit) else -1]), bool(len(hit))


@dataclass
class StudyArm:
    """An arm of a study: its ended runs, and one value per seed.

    `values` maps each seed to the result of `value_of`, which is None if the seed diverged.
    `missing` contains the names of runs that have not ended.
    """

    name: str
    lr: float | None
    runs: list[StudyRun] = field(default_factory=list)
    values: dict[int, float | None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    @property
    def known(self) -> dict[int, float]:
        """Value by seed, without diverged seeds."""
        return {seed: value for seed, value in self.values.items() if value is not None}

    @property
    def finite(self) -> list[float]:
        return [*self.known.values()]

    @property
    def mean(self) -> Estimate | None:
        return estimate(self.finite) if self.finite else None

    def times(self, level: float) -> Times:
        """Return the results of `StudyRun.reached(level)` for all runs, ordered by seed."""
        runs = sorted(self.runs, key=lambda run: run.seed)  # their order changes drawn labels
        return Times.of(run.reached(level) for run in runs)

    def numbers(self, limits: tuple[float, float]) -> dict[str, Any]:
        """Return the content of verdict.json.

        Args:
            limits: least and largest possible value of the metric.
        """
        mean = self.mean.within(*limits) if self.mean else None
        first = self.runs[0] if self.runs else None
        return {
            "variant": first and first.variant,
            "parameters": first and first.facts.parameters,
            "flops_per_token": first and first.facts.flops_per_token,
            "tokens": first and first.planned_tokens,
            "rates": sorted({run.lr for run in self.runs}),
            "lr": self.lr,
            **{name: mean and getattr(mean, name) for name in ("mean", "low", "high")},
            "values": {str(seed): value for seed, value in self.values.items()},
            "losses": {run.name: run.loss for run in self.runs},
            "diverged": self.diverged,
            "missing": self.missing,
        }


def read_run(run: Run, study: Study, planned: Planned, digest: str) -> StudyRun:
    """Extract the measured values of an ended run.

    `planned` is the run's entry in the study's plan, and `digest` the `config_digest` of the
    planned config. Raises ConfigError if the run did not log the study's metric.
    """
    sweep = study.metric == LR_SENSITIVITY
    value = run.final_loss
    is_loss = sweep or study.metric == "heldout_loss"
    logged = LOSS if is_loss else study.metric
    curve = run.series(logged)
    where = f"arm {planned.arm}, seed {planned.seed}: {run.path}"
    if any(rule.needs_curve for rule in study.rules) and not len(curve.tokens):
        raise ConfigError(f"{where}/metrics.jsonl has no values of {logged}; choose another metric")
    positions = None
    if value is not None and study.octave:
        positions = position_losses(run)
    if value is not None and positions and study.octave:
        if (value := positions.at(study.octave)) is None:
            raise ConfigError(
                f"{where} has no held-out document with more than {study.octave:,} tokens; choose "
                "another metric"
            )
    elif value is not None and not sweep:
        if (number := number_of(run, study.metric)) is None:
            file = "summary.json" if study.metric in OF_THE_SUMMARY else "metrics.jsonl"
            raise ConfigError(f"{where}/{file} has no {study.metric}; choose another metric")
        value = number if math.isfinite(number) else None
    documents = None
    if is_loss and value is not None:
        with suppress(CheckpointError):
            documents = rounded(document_losses(run.path))
    own, problem = config_digest(run.cfg, study), change_during_run(run.path)
    config = config_of_planned(planned)
    other_start = starting_point(run.cfg, run.path) != starting_point(config)
    if own != digest or other_start or planned.lr not in (None, run.cfg.optim.lr):
        problem = strayed(run.path, run.cfg, config, is_hashed)
    return StudyRun(
        name=planned.name,
        seed=planned.seed,
        lr=run.cfg.optim.lr,
        loss=run.final_loss,
        value=value,
        planned_tokens=run.planned_tokens,
        vocab_size=run.cfg.model.vocab_size,
        curve=curve,
        documents=documents,
        facts=facts_of(run.facts),
        settings=settings_of(run.cfg, study.sets_rates, run.facts.get("previous")),
        variant=run.variant,
        training_flops=training_flops_of(run),
        train_seconds=run.train_seconds if study.profile else None,
        plugin_code=run.plugin_code,
        mark=run.cfg.run.study or "",
        strayed=problem,
        positions=positions,
        chance=chance_of(run, study.metric),
        digest=own,
        thin=thin_note([run]),
    )


def training_flops_of(run: Run) -> float | None:
    """Return the tokens of a finished run times its FLOPs per token, which count visible keys."""
    tokens = finite((run.summary or {}).get("tokens"))
    flops_per_token = finite(run.facts.get("flops_per_token"))
    return tokens * flops_per_token if tokens and flops_per_token else None


def rounded(losses: DocumentLosses) -> DocumentLosses:
    return replace(losses, nats=np.array([float(f"{x:.{DIGITS}g}") for x in losses.nats]))


def chance_of(run: Run, metric: str) -> float | None:
    if not metric.startswith(TASKS):
        return None
    values = run.series(f"tasks_chance/{metric.removeprefix(TASKS)}").values
    return float(values[-1]) if len(values) and math.isfinite(values[-1]) else None


def text_hash(documents: DocumentLosses) -> str:
    """Return a SHA-256 hash that identifies the held-out documents, independent of the losses."""
    content = [np.ascontiguousarray(each).tobytes() for each in (documents.texts, documents.tokens)]
    return hashlib.sha256(b"".join(content)).hexdigest()


def number_of(run: Run, name: str) -> float | None:
    """Return the final value of metric `name`: NaN if not finite, None if it was not logged."""
    if run.summary and name in run.summary:
        number = finite(run.summary[name])
        return math.nan if number is None else number
    metric = None if name in OF_THE_SUMMARY else metric_of(name)
    if metric and metric.column:
        value = run_value(run, metric)
    else:
        values = run.series(name).values
        value = float(values[-1]) if len(values) else None
    return value


def value_of(runs: list[StudyRun], study: Study) -> float | None:
    """Return the metric of one arm and seed; None if every run in `runs` diverged.

    `runs` contains the single run of this arm and seed. In a study with `lr_sweep`, `runs` contains
    one run per learning rate, and the metric is the result of `lr_sensitivity`. With scale=log,
    return the logarithm of the metric, and raise ConfigError if the metric is not above 0.
    """
    value = runs[0].value
    if study.lr_sweep:
        value = lr_sensitivity([run.loss for run in runs], runs[0].vocab_size)
    return None if value is None else on_scale(value, runs[0].name, study)


def on_scale(value: float, run: str, study: Study) -> float:
    """Return `value` if the study has scale=linear, and log(value) if it has scale=log.

    With scale=log, raise ConfigError if `value` is not above 0.
    """
    if study.scale == "linear":
        return value
    if value <= 0:
        raise ConfigError(
            f"{run}: {study.metric}={value:g} must be above 0 with scale=log; use scale=linear"
        )
    return math.log(value)


def lr_sensitivity(losses: Sequence[float | None], vocab_size: int) -> float | None:
    """Return the learning rate sensitivity (Wortsman et al., arXiv:2309.14322), in nats per token.

    The sensitivity is the mean minus the minimum of the final losses over all learning rates. Each
    loss is first capped at log(vocab_size), the loss at initialization. A diverged run (None) gets
    the loss log(vocab_size). Return None if all runs diverged.
    """
    initial = math.log(vocab_size)
    finite = [loss for loss in losses if loss is not None]
    if not finite:
        return None
    capped = [initial if loss is None else min(loss, initial) for loss in losses]
    return sum(capped) / len(capped) - min(*finite, initial)
