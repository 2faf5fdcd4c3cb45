"""Arms of a study, and the values of their ended runs.

An arm is one of the compared configs, with one run per seed (or per seed and learning rate).
"""

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from diffllm.compare.report.curves import LOSS
from diffllm.compare.report.notes import thin_note
from diffllm.compare.report.rows import run_value
from diffllm.compare.report.runs import Run, Series
from diffllm.compare.study.file import LR_SENSITIVITY, OF_THE_SUMMARY, TASKS, Study
from diffllm.compare.study.planned_runs import Planned, config_of_planned, on_its_way, strayed
from diffllm.compare.study.study_hash import UNHASHED, config_digest
from diffllm.compare.study.trend_data import PositionLosses, needs_positions, position_losses
from diffllm.compare.study.unequal import RECORDED, settings_of
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.evaluation.heldout import DocumentLosses, document_losses
from diffllm.metrics.records import finite
from diffllm.metrics.table import metric_of
from diffllm.statistics.estimates import Estimate, Times, estimate

DIGITS = 7
"""Significant digits of stored document losses."""
NONE = Series(np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True)
class Facts:
    """Facts that run.json records about a run; a field is None if the fact is unknown."""

    parameters: float | None = None
    flops_per_token: float | None = None
    heldout_tokens: float | None = None
    ranks: float | None = None
    corpus: str | None = None
    corpus_note: str | None = None
    tokenizer: str | None = None
    compute_dtype: str | None = None
    torch: str | None = None
    python: str | None = None
    device: str | None = None
    code: str | None = None


@dataclass(frozen=True, eq=False)
class StudyRun:
    """The values of an ended run that a verdict uses."""

    name: str
    """Run directory, relative to the directory of the study."""
    seed: int
    lr: float
    loss: float | None
    """Final held-out loss in nats per token; None if the run diverged."""
    value: float | None
    """Final value of the study's metric (the loss for lr_sensitivity); None if the run diverged."""
    planned_tokens: int
    vocab_size: int
    curve: Series = NONE
    """Logged values of the metric, (n,) each; NaN if not finite, empty if not logged."""
    documents: DocumentLosses | None = None
    """None if the metric is not the held-out loss, or if the run has no losses of documents."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts of run.json, see `facts_of`."""
    settings: dict[str, str] = field(default_factory=dict)
    """See `settings_of`."""
    variant: str = ""
    plugin_code: dict[str, str] = field(default_factory=dict)
    mark: str = ""
    """run.study: hash, stage and arm at the start of the run."""
    strayed: str = ""
    """Differences between the run's config and the study's; empty if none."""
    positions: PositionLosses | None = None
    """None unless a rule needs a trend over positions."""
    chance: float | None = None
    """Expected share of right answers by guessing; None for metrics other than tasks/*."""
    digest: str = ""
    """See `config_digest`."""
    thin: str = ""
    """Warning about too little held-out text; empty if there is enough."""

    @property
    def diverged(self) -> bool:
        return self.value is None

    @property
    def conditions(self) -> dict[str, Any]:
        """Settings and facts that must be equal in all arms, by name or dotted config key."""
        found = {**self.settings, **{name: self.facts.get(name) for name in RECORDED}}
        if self.documents is not None:
            found["heldout_texts"] = text_hash(self.documents)
        return found

    @property
    def flops_per_token(self) -> float | None:
        """Training FLOPs per token; None if an older version of diffllm made the run."""
        return finite(self.facts.get("flops_per_token"))

    def reached(self, level: float) -> tuple[float, bool]:
        """Return the number of tokens at which the metric first reached `level`, and True.

        If the metric never reached `level`, return the tokens at the last logged value, and False.
        If the run diverged, return the planned tokens, and False.
        """
        if self.diverged:
            return self.planned_tokens, False
        hit = np.flatnonzero(self.curve.values >= level)
        return int(self.curve.tokens[hit[0] if len(hit) else -1]), bool(len(hit))


@dataclass
class StudyArm:
    """One of the compared configs of a study: its ended runs and their values."""

    name: str
    lr: float | None
    runs: list[StudyRun] = field(default_factory=list)
    values: dict[int, float | None] = field(default_factory=dict)
    """Value by seed, on the study's scale; None if the seed diverged."""
    missing: list[str] = field(default_factory=list)

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    @property
    def known(self) -> dict[int, float]:
        """Value of each seed that did not diverge."""
        return {seed: value for seed, value in self.values.items() if value is not None}

    @property
    def finite(self) -> list[float]:
        return [*self.known.values()]

    @property
    def mean(self) -> Estimate | None:
        return estimate(self.finite) if self.finite else None

    def times(self, level: float) -> Times:
        """Return the tokens that each run needs until the metric reaches `level`."""
        runs = sorted(self.runs, key=lambda run: run.seed)  # their order changes drawn labels
        return Times.of(run.reached(level) for run in runs)

    def numbers(self) -> dict[str, Any]:
        mean, first = self.mean, self.runs[0] if self.runs else None
        return {
            "variant": first and first.variant,
            **{name: first and first.facts.get(name) for name in ("parameters", "flops_per_token")},
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
    """Extract the values that a verdict needs from an ended run.

    Raises ConfigError if the run did not record the study's metric.

    Args:
        planned: the planned run that `run` executes.
        digest: SHA-256 of the planned config.
    """
    sweep = study.metric == LR_SENSITIVITY
    value = run.final_loss
    is_loss = sweep or study.metric == "heldout_loss"
    logged = LOSS if is_loss else study.metric
    curve = run.series(logged)
    where = f"arm {planned.arm}, seed {planned.seed}: {run.path}"
    if any(rule.needs_curve for rule in study.rules) and not len(curve.tokens):
        raise ConfigError(f"{where}/metrics.jsonl has no {logged}")
    if value is not None and not sweep:
        if (number := number_of(run, study.metric)) is None:
            file = "summary.json" if study.metric in OF_THE_SUMMARY else "metrics.jsonl"
            raise ConfigError(f"{where}/{file} has no {study.metric}")
        value = number if math.isfinite(number) else None
    documents = None
    if is_loss and value is not None:
        with suppress(CheckpointError):
            documents = rounded(document_losses(run.path))
    positions = None
    if value is not None and needs_positions(study, planned.arm):
        positions = position_losses(run)
    own, problem = config_digest(run.cfg, study), on_its_way(run.path)
    if own != digest or planned.lr not in (None, run.cfg.optim.lr):
        problem = strayed(run.path, run.cfg, config_of_planned(planned), UNHASHED)
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
        settings=settings_of(run.config),
        variant=run.variant,
        plugin_code=run.plugin_code,
        mark=run.cfg.run.study or "",
        strayed=problem,
        positions=positions,
        chance=chance_of(run, study.metric),
        digest=own,
        thin=thin_note([run]),
    )


def facts_of(found: dict[str, Any]) -> dict[str, Any]:
    """Select the facts of a run.json that a verdict uses or shows; unknown facts are None."""
    python = (found.get("environment") or {}).get("python")
    code = (found.get("diffllm") or {}).get("hash")
    return {
        **{fact.name: found.get(fact.name) for fact in fields(Facts)},
        "python": python if isinstance(python, str) else None,
        "code": code if isinstance(code, str) else None,
    }


def rounded(losses: DocumentLosses) -> DocumentLosses:
    """Return losses rounded to `DIGITS` significant digits, the precision of values.json."""
    return replace(losses, nats=np.array([float(f"{x:.{DIGITS}g}") for x in losses.nats]))


def chance_of(run: Run, metric: str) -> float | None:
    if not metric.startswith(TASKS):
        return None
    values = run.series(f"tasks_chance/{metric.removeprefix(TASKS)}").values
    return float(values[-1]) if len(values) and math.isfinite(values[-1]) else None


def text_hash(documents: DocumentLosses) -> str:
    """Return a SHA-256 that is equal for runs measured on the same held-out documents."""
    content = [np.ascontiguousarray(each).tobytes() for each in (documents.texts, documents.tokens)]
    return hashlib.sha256(b"".join(content)).hexdigest()


def number_of(run: Run, name: str) -> float | None:
    """Return the final value of the metric `name` of a run.

    Return NaN if the value is not finite, and None if the run did not log the metric.
    """
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
    """Return the value that one seed contributes to the study; None if the seed diverged.

    The value is a logarithm if the study has scale=log. Raises ConfigError if the logarithm is not
    defined.

    Args:
        runs: the runs of one arm and seed: several for learning rate sensitivity, otherwise one.
    """
    value = runs[0].value
    if study.lr_sweep:
        value = lr_sensitivity([run.loss for run in runs], runs[0].vocab_size)
    return None if value is None else on_scale(value, runs[0].name, study)


def on_scale(value: float, run: str, study: Study) -> float:
    """Return `value`, or its logarithm if the study has scale=log.

    Raises ConfigError if the logarithm is not defined.

    Args:
        run: name of the run, for the error.
    """
    if study.scale == "linear":
        return value
    if value <= 0:
        raise ConfigError(f"{run}: {study.metric}={value:g} has no logarithm")
    return math.log(value)


def lr_sensitivity(losses: Sequence[float | None], vocab_size: int) -> float | None:
    """Return the learning rate sensitivity (Wortsman et al., arXiv:2309.14322), in nats per token.

    The loss at each learning rate is limited to the initial loss log(vocab_size), which also
    replaces the loss of a diverged run. The sensitivity is the mean of these values minus the
    lowest. Return None if all runs diverged.

    Args:
        losses: final loss at each learning rate; None for a diverged run.
    """
    initial = math.log(vocab_size)
    finite = [loss for loss in losses if loss is not None]
    if not finite:
        return None
    capped = [initial if loss is None else min(loss, initial) for loss in losses]
    return sum(capped) / len(capped) - min(*finite, initial)
