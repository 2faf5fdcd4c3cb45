"""Runs on disk, as the report reads them."""

import math
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffllm.config import TrainConfig
from diffllm.config.saved import flatten, load_run_config, yaml_dict
from diffllm.core.files import read_lines, readable
from diffllm.core.printing import to_stderr
from diffllm.metrics.records import (
    diverged,
    finite,
    read_changes,
    read_metrics_line,
    read_record,
    read_summary,
)


class Series(NamedTuple):
    """One metric over a run, where it was logged."""

    tokens: np.ndarray
    """(n,) int64, increasing unless the batch became smaller on the way."""
    values: np.ndarray
    """(n,), or (n, L) for a quantity of every layer; float64, NaN for what is not finite."""


class Metrics:
    """metrics.jsonl, a column a metric.

    Args:
        lines: the numbers of each line, `step` and `tokens` among them; None becomes NaN. A line
            that is None, or not after the line before, is skipped and counted.
    """

    def __init__(self, lines: Iterable[dict[str, Any] | None]):
        self.skipped = 0
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
        """(n,) int64, of every line."""
        self.tokens = np.array(tokens)
        """(n,) int64, of every line."""
        self.columns = {
            name: (np.array(places), np.array(values)) for name, (places, values) in columns.items()
        }
        """Metric to the places of the lines that hold it, and its values there."""


@dataclass(eq=False)
class Run:
    """A run directory."""

    path: Path
    cfg: TrainConfig
    facts: dict[str, Any]
    """run.json: parameters, active_parameters, flops_per_token, corpus, tokenizer, ..."""
    summary: dict[str, Any] | None
    """summary.json; None until the run has reached its last step."""
    metrics: Metrics
    changes: list[str] = field(default_factory=list)
    """The changes that were made to it on the way: "steps 40 to 80 after step 40"."""
    gave_up: bool = False
    """Whether it stopped for good because too many updates in a row were skipped."""

    @property
    def variant(self) -> str:
        return self.cfg.run.choices["attention"]

    @cached_property
    def config(self) -> dict[str, Any]:
        return flatten(yaml_dict(self.cfg))

    @property
    def plugin_code(self) -> dict[str, str]:
        """Its plugins and their versions; "unknown" if an older version of diffllm ran it."""
        return self.facts.get("plugin_code") or dict.fromkeys(self.cfg.plugins, "unknown")

    @property
    def seeds(self) -> tuple[int, int]:
        """(seed, model.init_seed): what the order of samples and the initial values come from."""
        return self.cfg.seed, self.cfg.model.init_seed

    @property
    def final_loss(self) -> float | None:
        """Held-out loss after the last step, nats a token; None unless finished and finite."""
        return finite((self.summary or {}).get("heldout_loss"))

    @property
    def ended(self) -> bool:
        """Whether it came to an end of its own: its last step, or too many skipped updates."""
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
    def last_step(self) -> int:
        return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0

    def series(self, name: str) -> Series:
        """A metric by its full name; empty if it was never logged."""
        if name not in self.metrics.columns:
            return Series(np.zeros(0, np.int64), np.zeros(0))
        places, values = self.metrics.columns[name]
        return Series(self.metrics.tokens[places], values)

    def reached(self, name: str, level: float) -> tuple[int, bool] | None:
        """The tokens after which a metric first was at a level or above it, and whether it ever
        was; without, those of its last value. None if it was never logged."""
        tokens, values = self.series(name)
        if not len(tokens):
            return None
        hit = np.flatnonzero(values >= level)
        return (int(tokens[hit[0]]), True) if len(hit) else (int(tokens[-1]), False)

    def by_layer(self, quantity: str) -> Series:
        """`<quantity>/layer_00`, ... as one (n, L) array; empty, (0, 0), if never logged."""
        columns = [
            self.metrics.columns[f"{quantity}/layer_{layer:02d}"] for layer in self.layers(quantity)
        ]
        common = reduce(np.intersect1d, (places for places, _ in columns)) if columns else ()
        if not len(common):
            return Series(np.zeros(0, np.int64), np.zeros((0, 0)))
        layers = [values[np.searchsorted(places, common)] for places, values in columns]
        return Series(self.metrics.tokens[common], np.stack(layers, axis=1))

    def layers(self, quantity: str) -> list[int]:
        """The layers that have a quantity, from 0; experts may begin behind dense layers."""
        prefix = f"{quantity}/layer_"
        names = (name for name in self.metrics.columns if name.startswith(prefix))
        return sorted(int(name.removeprefix(prefix)) for name in names)


def load_run(path: Path) -> Run:
    """Read a run directory, finished or not; a warning counts the skipped lines of metrics.jsonl.

    Raises CheckpointError for what is not a run directory of this version.
    """
    cfg = load_run_config(path)
    facts, summary = read_record(path / "run.json"), read_summary(path)
    changes = changes_of(path)
    metrics = read_metrics(path)
    if metrics.skipped:
        to_stderr(f"warning: {skipped_text(path, metrics.skipped)}")
    return Run(path, cfg, facts or {}, summary, metrics, changes, diverged(path))


def skipped_text(path: Path, lines: int) -> str:
    return f"{path}/metrics.jsonl: skipped {lines} damaged or misplaced line{'s' * (lines > 1)}"


def changes_of(path: Path) -> list[str]:
    """The changes of a run that came after a step was made; raises CheckpointError."""
    return [
        f"{key} {before} to {now} after step {line['step']}"
        for line in read_changes(path)
        if line["step"]
        for key, (before, now) in line["changes"].items()
    ]


def read_metrics(path: Path) -> Metrics:
    """The metrics of a run; a last line that is still being written is no damage. Raises
    CheckpointError."""
    file = path / "metrics.jsonl"
    with readable(file), suppress(FileNotFoundError):
        read = ((text, read_metrics_line(text)) for text in read_lines(file))
        return Metrics(line for text, line in read if line is not None or text.endswith("\n"))
    return Metrics([])
