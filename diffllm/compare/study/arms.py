"""Arms of a study and the measured values of their runs.

An arm is one of the compared configs. Each arm has one run per seed, or, in a study with
`lr_sweep`, one run per seed and learning rate.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from diffllm.compare.arms.arm import Arm
from diffllm.compare.arms.run import Series
from diffllm.compare.study.file import Study
from diffllm.core.bounds import bounded
from diffllm.core.errors import ConfigError
from diffllm.core.run_facts import RunFacts
from diffllm.core.run_files import LARGEST
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.statistics.estimates import Times

FINITE = {"least": -LARGEST, "most": LARGEST}
"""Bounds of measured numbers."""
LOSS_BOUNDS = {"least": 0, "most": LARGEST}
"""Bounds of mean losses in nats per token."""


@dataclass(frozen=True)
class Texts:
    """Properties of the held-out documents that one or more runs were measured on.

    Each list has one entry per document.
    """

    tokens: list[int] = field(metadata={"least": 1})
    bytes: list[int] = field(metadata={"least": 0})
    texts: list[int]
    """The first 8 bytes of the text's SHA-256 as an integer."""
    sources: list[int]
    """Index of the data source."""

    @classmethod
    def of(cls, losses: DocumentLosses) -> "Texts":
        return cls(
            tokens=losses.tokens.tolist(),
            bytes=losses.bytes.tolist(),
            texts=losses.texts.tolist(),
            sources=losses.sources.tolist(),
        )

    @cached_property
    def hash(self) -> str:
        """SHA-256 that identifies the documents."""
        digest = hashlib.sha256()
        for column in (self.texts, self.tokens):
            digest.update(np.array(column, np.int64).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class RateRun:
    """An ended run in the grid of learning rates."""

    name: str
    loss: float | None = field(metadata=LOSS_BOUNDS)
    """Final held-out loss; None if the run diverged."""
    strayed: str = ""
    """Differences from the planned config; empty without differences."""


@dataclass(frozen=True, eq=False)
class StudyRun:
    """Measured values of an ended run, from which a verdict is computed.

    The fields are also the keys of a run in values.json.
    """

    name: str
    arm: str
    seed: int
    lr: float = field(metadata={"above": 0})
    loss: float | None = field(metadata=LOSS_BOUNDS)
    """Final held-out loss in nats per token; None if the run diverged."""
    value: float | None = field(metadata=FINITE)
    """Final value of the study's metric (for lr_sensitivity, the loss); None if diverged."""
    planned_tokens: int = field(metadata={"least": 0})
    vocab_size: int = field(metadata={"least": 1})
    variant: str = ""
    mark: str = ""
    """Saved config key run.study: the study's hash, the stage and the arm."""
    facts: RunFacts = field(default_factory=RunFacts)
    settings: dict[str, str] = field(default_factory=dict)
    """Formatted values of the compared config keys, see `settings_of`."""
    tokens: list[int] = field(default_factory=list, metadata={"least": 0})
    """Training tokens at which the metric was logged; empty if it was not logged."""
    values: list[float | None] = field(default_factory=list, metadata=FINITE)
    """Logged metric after each number of tokens in `tokens`; None if not finite."""
    texts: Texts | None = None
    """None if the metric is not the held-out loss, or if the run has no losses of documents."""
    nats: list[float | None] | None = bounded(None, **FINITE)
    """Summed loss of each document in `texts`."""
    reached: dict[str, list[float]] = field(default_factory=dict)
    """Result of `first_reach` for each level of a log-rank rule, for readers of values.json."""
    plugin_code: dict[str, str] = field(default_factory=dict)
    """Hash of the code of each plugin."""
    strayed: str = ""
    """Differences from the planned config; empty without differences."""
    thin: str = ""
    """Warning if there is too little held-out text for a reliable loss; otherwise empty."""
    chance: float | None = bounded(None, **FINITE)
    """Expected share of right answers by guessing; None for metrics other than tasks/*."""
    training_flops: float | None = bounded(None, above=0, most=LARGEST)
    """Measured FLOPs of all training steps; None if unknown."""
    train_seconds: float | None = bounded(None, above=0, most=LARGEST)
    """Measured seconds of all training steps; None unless the study's budget is in seconds."""
    positions: list[float] | None = bounded(None, above=0, most=LARGEST)
    """First position of each octave of positions; None unless the metric is position/N."""
    position_losses: list[float | None] = field(default_factory=list, metadata=FINITE)
    """Mean held-out loss of each octave in `positions`."""
    position_settings: str = ""
    """JSON that identifies the documents of `positions`, which must be equal for all runs."""

    @property
    def diverged(self) -> bool:
        return self.value is None

    @cached_property
    def curve(self) -> Series:
        """Logged metric over training tokens, arrays (n,); NaN if not finite."""
        # None becomes NaN.
        return Series(np.array(self.tokens, np.int64), np.array(self.values, np.float64))

    @cached_property
    def documents(self) -> DocumentLosses | None:
        if self.texts is None or self.nats is None:
            return None
        return DocumentLosses(
            np.array(self.nats, np.float64),
            np.array(self.texts.tokens, np.int64),
            np.array(self.texts.bytes, np.int64),
            np.array(self.texts.texts, np.int64),
            np.array(self.texts.sources, np.int64),
        )

    @property
    def conditions(self) -> dict[str, Any]:
        """Settings and other conditions of the run that a verdict compares between the arms.

        Example: {"seq_len": "2,048", "torch": "2.9.0"}.
        """
        values = {**self.settings, **vars(self.facts)}
        if self.texts is not None:
            values["heldout_texts"] = self.texts.hash
        return values

    def first_reach(self, level: float) -> tuple[float, bool]:
        """Return the training tokens at which the metric first was at least `level`, and True.

        If the metric was never at least `level`, return the training tokens at the last logged
        value, and False. If the run diverged, return the planned training tokens, and False.
        """
        if self.diverged:
            return self.planned_tokens, False
        for tokens, value in zip(self.tokens, self.values, strict=True):
            if value is not None and value >= level:
                return tokens, True
        return self.tokens[-1], False


@dataclass(frozen=True, eq=False)
class StudyArm(Arm[int]):
    """The ended runs of an arm. The compared value of a seed is the result of `value_of`."""

    lr: float | None = None
    """Chosen learning rate; None in a study without the key `lr`."""
    runs: Sequence[StudyRun] = ()
    missing: Sequence[str] = ()
    """Names of runs that have not ended."""

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    @property
    def documents(self) -> dict[int, DocumentLosses]:
        losses = {}
        for run in self.runs:
            if run.documents is not None:
                losses[run.seed] = run.documents
        # With several learning rates, the value of a seed is not the loss of a single run.
        return losses if len(self.seed_values) == len(self.runs) else {}

    @property
    def curves(self) -> dict[int, Series]:
        return {run.seed: run.curve for run in self.runs if not run.diverged}

    @property
    def planned_tokens(self) -> set[int]:
        return {run.planned_tokens for run in self.runs}

    def times(self, level: float) -> Times:
        """Return the results of `StudyRun.first_reach` for all runs, ordered by seed."""
        # The permutation test draws labels by position, so the order of the runs must be fixed.
        runs = sorted(self.runs, key=lambda run: run.seed)
        return Times.of(run.first_reach(level) for run in runs)

    def numbers(self, limits: tuple[float, float]) -> dict[str, Any]:
        """Return the content of verdict.json.

        Args:
            limits: least and largest possible value of the metric.
        """
        mean = self.mean.within(*limits) if self.mean else None
        # Readers of verdict.json find the same keys for an arm without runs.
        facts = dict.fromkeys(("variant", "parameters", "flops_per_token", "tokens"))
        if self.runs:
            run = self.runs[0]
            facts = {
                "variant": run.variant,
                "parameters": run.facts.parameters,
                "flops_per_token": run.facts.flops_per_token,
                "tokens": run.planned_tokens,
            }
        return facts | {
            "rates": sorted({run.lr for run in self.runs}),
            "lr": self.lr,
            "mean": mean.mean if mean else None,
            "low": mean.low if mean else None,
            "high": mean.high if mean else None,
            "values": {str(seed): value for seed, value in self.seed_values.items()},
            "losses": {run.name: run.loss for run in self.runs},
            "diverged": self.diverged,
            "missing": self.missing,
        }


def value_of(runs: Sequence[StudyRun], study: Study) -> float | None:
    """Return the metric of one arm and seed; None if every run in `runs` diverged.

    `runs` contains the single run of this arm and seed. In a study with `lr_sweep`, `runs` contains
    one run per learning rate, and the metric is the result of `lr_sensitivity`. With scale=log,
    return the logarithm of the metric, and raise ConfigError if the metric is not above 0.
    """
    value = runs[0].value
    if study.lr_sweep:
        value = lr_sensitivity([run.loss for run in runs], runs[0].vocab_size)
    if value is None or study.scale == "linear":
        return value
    if value <= 0:
        raise ConfigError(
            f"{runs[0].name}: {study.metric}={value:g} must be above 0 with scale=log; use "
            "scale=linear"
        )
    return math.log(value)


def lr_sensitivity(losses: Sequence[float | None], vocab_size: int) -> float | None:
    """Return the learning rate sensitivity (Wortsman et al., arXiv:2309.14322), in nats per token.

    The sensitivity is the mean minus the minimum of the final losses over all learning rates. Each
    loss is first capped at log(vocab_size), the loss at initialization. A diverged run (None) gets
    the loss log(vocab_size). Return None if all runs diverged.
    """
    initial = math.log(vocab_size)
    capped = []
    is_measured = False
    for loss in losses:
        if loss is None:
            capped.append(initial)
            continue
        is_measured = True
        capped.append(min(loss, initial))
    # Without this test, an arm that diverged at all rates would have the sensitivity 0, the best.
    if not is_measured:
        return None
    return sum(capped) / len(capped) - min(capped)
