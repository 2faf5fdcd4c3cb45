"""Runs on disk, as the report reads them."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffllm.config import TrainConfig
from diffllm.run_directory import load_run_config


class Series(NamedTuple):
    """One metric over a run, where it was logged."""

    tokens: np.ndarray
    """(n,) int64, increasing."""
    values: np.ndarray
    """(n,), or (n, L) for a quantity of every layer; float64, NaN for null."""


@dataclass
class Run:
    """A run directory."""

    path: Path
    cfg: TrainConfig
    facts: dict[str, Any]
    """run.json: parameters, active_parameters, flops_per_token, corpus, tokenizer, ..."""
    summary: dict[str, Any] | None
    """summary.json; None until the run has reached its last step."""
    lines: list[dict[str, Any]]
    """metrics.jsonl."""

    @property
    def variant(self) -> str:
        """Its choice of `attention=`."""
        return self.cfg.run.choices["attention"]

    def series(self, name: str) -> Series:
        """A metric by its full name; empty if it was never logged."""
        rows = [(line["tokens"], line[name]) for line in self.lines if name in line]
        tokens = np.array([t for t, _ in rows], dtype=np.int64)
        return Series(tokens, np.array([v for _, v in rows], dtype=np.float64))

    def by_layer(self, quantity: str) -> Series:
        """`<quantity>/layer_00`, ... as one (n, L) array; empty, (0, 0), if never logged."""
        names = sorted(name for name in self.names if name.startswith(f"{quantity}/layer_"))
        layers = [self.series(name) for name in names]
        if not layers:
            return Series(np.zeros(0, np.int64), np.zeros((0, 0)))
        return Series(layers[0].tokens, np.stack([layer.values for layer in layers], axis=1))

    @cached_property
    def names(self) -> set[str]:
        """Every metric that some line holds."""
        return {name for line in self.lines for name in line}


def load_run(path: Path) -> Run:
    """Read a run directory, finished or not.

    Raises:
        CheckpointError: it is not a run directory of this version.
    """
    cfg = load_run_config(path)
    facts, summary = path / "run.json", path / "summary.json"
    text = (path / "metrics.jsonl").read_text() if (path / "metrics.jsonl").exists() else ""
    return Run(
        path,
        cfg,
        json.loads(facts.read_text()) if facts.exists() else {},
        json.loads(summary.read_text()) if summary.exists() else None,
        [json.loads(line) for line in text.splitlines()],
    )
