"""Runs: read the config, run.json, summary and metrics of a run directory."""

import math
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffllm.config import TrainConfig
from diffllm.config.saved import flatten, load_run_config, yaml_dict
from diffllm.core.errors import CheckpointError
from diffllm.core.keys import Declaration, declarations
from diffllm.core.printing import to_stderr
from diffllm.core.run_files import (
    RunFile,
    diverged,
    finite,
    metrics_lines,
    read_changes,
    read_facts,
    read_summary,
    recorded_variables,
)
from diffllm.evaluation.heldout import DocumentLosses, document_losses
from diffllm.metrics.metric import Metric
from diffllm.metrics.steps import read_steps

VISIBLE_KEYS = "data/visible_keys"
EVAL_LOSS = "eval/loss"
"""Logged metric whose curve reports and studies compare: the loss of the held-out sample."""
LOSS_DIGITS = 7
"""Significant digits of document losses in values.json, and so in all comparisons of runs."""


class Series(NamedTuple):
    """Logged values of one metric of a run, and the number of training tokens at each value."""

    tokens: np.ndarray
    """(n,) int64, increasing, except if a run of an older version changed to a smaller batch."""
    values: np.ndarray
    """(n,), or (n, L) for a quantity of every layer; float64, NaN instead of infinity."""


NO_VALUES = Series(np.zeros(0, np.int64), np.zeros(0))


class Metrics:
    """The content of metrics.jsonl, as one array per metric.

    A line is skipped if it is damaged, or if its step is not above the previous step. `skipped` is
    the number of skipped lines.

    Args:
        lines: one dict per line, such as {"step": 1, "tokens": 512, "train/loss": 2.1}; None for a
            damaged line. A metric with the value None (null in the file) is stored as NaN.
    """

    def __init__(self, lines: Iterable[dict[str, Any] | None]):
        self.skipped = 0
        # Arrays of machine numbers: lists would need several times the memory for a long run.
        steps, tokens = array("q"), array("q")
        columns: dict[str, tuple[array[int], array[float]]] = {}
        for line in lines:
            if line is None or (steps and line["step"] <= steps[-1]):
                self.skipped += 1
                continue
            for name, value in line.items():
                if name not in ("step", "tokens"):
                    places, values = columns.setdefault(name, (array("q"), array("d")))
                    places.append(len(steps))
                    values.append(math.nan if value is None else value)
            steps.append(line["step"])
            tokens.append(line["tokens"])
        self.steps = np.array(steps)
        """Steps of all lines, (n,) int64."""
        self.tokens = np.array(tokens)
        """Tokens of all lines, (n,) int64."""
        self.columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """By metric: indices of the lines that contain the metric, and its values."""
        for name, (places, values) in columns.items():
            self.columns[name] = (np.array(places), np.array(values))

    def series(self, name: str) -> Series:
        """Return the logged values of a metric; empty if the metric was not logged."""
        if name not in self.columns:
            return NO_VALUES
        places, values = self.columns[name]
        return Series(self.tokens[places], values)


@dataclass(eq=False)
class Run:
    """Content of a run directory, as read for a report.

    `facts` is the content of run.json. `summary` is the content of summary.json; None until the run
    has reached its last step. `changes` describes changed config keys by old value, new value and
    training step, such as "steps 40 to 80 after step 40". `gave_up` is True if training stopped
    because too many consecutive updates were skipped.
    """

    path: Path
    cfg: TrainConfig
    facts: dict[str, Any]
    summary: dict[str, Any] | None
    metrics: Metrics
    changes: list[str] = field(default_factory=list)
    gave_up: bool = False

    @property
    def variant(self) -> str:
        return self.cfg.resolved.choices["attention"]

    @cached_property
    def config(self) -> dict[str, Any]:
        return flatten(yaml_dict(self.cfg))

    @cached_property
    def declarations(self) -> dict[str, Declaration]:
        """Declarations of all config keys, those of plugins included, by dotted key."""
        return declarations(self.cfg)

    @property
    def plugin_code(self) -> dict[str, str]:
        """Hash of the code of each plugin; "unknown" for runs of older versions of diffllm."""
        return self.facts.get("plugin_code") or dict.fromkeys(self.cfg.plugins, "unknown")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that run.json records, such as WANDB_PROJECT."""
        return recorded_variables(self.facts)

    @property
    def seeds(self) -> tuple[int, int]:
        """The pair (seed, model.init_seed)."""
        return self.cfg.seed, self.cfg.model.init_seed

    @property
    def final_loss(self) -> float | None:
        """Final held-out loss in nats per token; None if the run is unfinished or diverged."""
        return self.summary_number("heldout_loss")

    def summary_number(self, name: str) -> float | None:
        """Return an entry of summary.json; None if it is missing or not finite."""
        return finite((self.summary or {}).get(name))

    @cached_property
    def documents(self) -> DocumentLosses | None:
        """Losses of the held-out documents with LOSS_DIGITS significant digits; None if unknown."""
        with suppress(CheckpointError):
            losses = document_losses(self.path)
            # Rounded as in values.json, so that a verdict from this file is the same.
            rounded = [float(f"{x:.{LOSS_DIGITS}g}") for x in losses.nats]
            return replace(losses, nats=np.array(rounded))
        return None

    @property
    def ended(self) -> bool:
        return self.summary is not None or self.gave_up

    @property
    def diverged(self) -> bool:
        return self.ended and self.final_loss is None

    @property
    def state(self) -> str:
        if self.diverged:
            return "diverged" if self.summary is not None else "diverged, stopped"
        return "unfinished" if self.summary is None else "finished"

    @property
    def tokens_per_step(self) -> int:
        return self.cfg.global_batch_size * self.cfg.seq_len

    @property
    def planned_tokens(self) -> int:
        return self.tokens_at(self.cfg.steps)

    def tokens_at(self, step: int) -> int:
        """Return the training tokens up to `step`.

        Steps after the last logged line up to `step` count with the batch of the config, because a
        resume may have changed the batch before this line.
        """
        line = int(np.searchsorted(self.metrics.steps, step, side="right")) - 1
        if line < 0:
            return step * self.tokens_per_step
        logged_tokens = int(self.metrics.tokens[line])
        unlogged_steps = step - int(self.metrics.steps[line])
        return logged_tokens + unlogged_steps * self.tokens_per_step

    @property
    def last_step(self) -> int:
        return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0

    def series(self, name: str) -> Series:
        return self.metrics.series(name)

    def last_value(self, name: str) -> float | None:
        """Return the last logged value of a metric: NaN if not finite, None if never logged."""
        values = self.series(name).values
        return float(values[-1]) if len(values) else None

    @property
    def training_flops(self) -> float | None:
        """Tokens of a finished run times its FLOPs per token, which count visible keys."""
        tokens = self.summary_number("tokens")
        flops_per_token = finite(self.facts.get("flops_per_token"))
        if not tokens or not flops_per_token:
            return None
        return tokens * flops_per_token

    @cached_property
    def train_seconds(self) -> float | None:
        """Summed times of the training steps; None if steps.npy has no such times."""
        try:
            seconds = read_steps(self.path / RunFile.STEPS)["train_seconds"]
        except CheckpointError:
            return None
        return finite(float(seconds[-1])) if len(seconds) else None

    def by_layer(self, quantity: str) -> Series:
        """Return a metric that is logged per layer, at the steps with a value for every layer.

        The field `values` has shape (steps, layers), or (0, 0) if there is no such step.

        Args:
            quantity: name of the metric without its layer suffix; "/layer_00" is such a suffix.
        """
        columns = []
        for layer in self.layers(quantity):
            columns.append(self.metrics.columns[f"{quantity}/layer_{layer:02d}"])
        # Lines of metrics.jsonl that contain every layer.
        common: Any = ()
        if columns:
            common = reduce(np.intersect1d, (places for places, _ in columns))
        if not len(common):
            return Series(np.zeros(0, np.int64), np.zeros((0, 0)))
        values_of_layers = []
        for places, values in columns:
            rows = np.searchsorted(places, common)
            values_of_layers.append(values[rows])
        tokens = self.metrics.tokens[common]
        return Series(tokens, np.stack(values_of_layers, axis=1))

    def layers(self, quantity: str) -> list[int]:
        prefix = f"{quantity}/layer_"
        layers = []
        for name in self.metrics.columns:
            if name.startswith(prefix):
                layers.append(int(name.removeprefix(prefix)))
        return sorted(layers)


def load_run(path: Path) -> Run:
    """Read the directory of a finished or unfinished run.

    Raises CheckpointError if a file is missing or damaged.
    """
    cfg = load_run_config(path)
    facts = read_facts(path)
    summary = read_summary(path)
    changes = []
    for line in read_changes(path):
        # The saved config describes all steps if it changed before the first step.
        if not line["step"]:
            continue
        for key, (before, after) in line["changes"].items():
            changes.append(f"{key} {before} to {after} after step {line['step']}")
    metrics = Metrics(metrics_lines(path))
    if metrics.skipped:
        to_stderr(f"warning: {skipped_text(path, metrics.skipped)}")
    facts = with_visible_keys(facts, metrics, cfg.seq_len)
    return Run(path, cfg, facts, summary, metrics, changes, diverged(path))


def with_visible_keys(facts: dict[str, Any], metrics: Metrics, seq_len: int) -> dict[str, Any]:
    """Return `facts` (the content of run.json) with flops_per_token corrected for masking.

    With data.mask_documents, a token attends only to tokens of the same document. The correction
    uses the logged mean number of visible keys per token. Without mask_documents, return `facts`
    unchanged.
    """
    tokens, keys = keys_seen(metrics)
    per_token, per_key = flops_facts(facts)
    if per_token is None or per_key is None:
        return facts
    if not len(tokens) or not math.isfinite(keys[-1]):
        return facts
    mean_keys = keys[-1] / tokens[-1]
    # run.json counts attention without document masks: a query then sees (seq_len + 1) / 2 keys.
    unmasked_keys = (seq_len + 1) / 2
    corrected = float(per_token + per_key * (mean_keys - unmasked_keys))
    return {**facts, "flops_per_token": corrected}


def flops_facts(facts: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return flops_per_token and flops_per_visible_key of run.json; each is None if unknown."""
    return finite(facts.get("flops_per_token")), finite(facts.get("flops_per_visible_key"))


def keys_seen(metrics: Metrics) -> Series:
    """Return the total number of attended keys as a function of training tokens.

    Each value is the number of keys that a query attends to, summed over all queries since the
    start of training. The result is empty if the run did not use data.mask_documents.
    """
    tokens, keys = metrics.series(VISIBLE_KEYS)
    if not len(tokens) or not tokens[-1]:
        return NO_VALUES
    # A line has the mean of the queries since the line before.
    queries = np.diff(tokens, prepend=0)
    return Series(tokens, np.cumsum(keys * queries))


def skipped_text(path: Path, lines: int) -> str:
    noun = "lines" if lines > 1 else "line"
    return f"{path / RunFile.METRICS}: skipped {lines} damaged or misplaced {noun}"


def run_value(run: Run, metric: Metric) -> float | None:
    """Return a run's value of a metric for report.csv.

    `metric.column.steps` selects the last step or all steps. `metric.column.of` is the reduction
    over these steps and over layers. Return None if the run has no finite value, and NaN if a layer
    is not finite: without this layer, the run would seem to have smaller outliers.
    """
    column = metric.column
    has_layers = metric.name.endswith("*")
    assert column
    final = run.summary_number(metric.name)
    if column.steps == "last" and final is not None:
        return final
    series = run.by_layer(metric.quantity) if has_layers else run.series(metric.name)
    values = series.values
    if column.steps == "last":
        values = values[-1:]
    is_finite = np.isfinite(values)
    if has_layers and not is_finite.all():
        return math.nan
    if not is_finite.any():
        return None
    reduce_values = getattr(np, column.of)
    return float(reduce_values(values[is_finite]))
