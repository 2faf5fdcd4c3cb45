"""Runs on disk, as the report reads them."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffllm.config import TrainConfig
from diffllm.errors import CheckpointError
from diffllm.run_directory import flatten, load_run_config, yaml_dict


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
    damaged_lines: int = 0
    """Lines of metrics.jsonl that could not be read, a last one that is still being written left
    out."""

    @property
    def variant(self) -> str:
        """Its choice of `attention=`."""
        return self.cfg.run.choices["attention"]

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config as flat keys and plain values, enums by name."""
        return flatten(yaml_dict(self.cfg))

    @property
    def seeds(self) -> tuple[int, int]:
        """(seed, model.init_seed): what the order of samples and the initial values come from."""
        return self.cfg.seed, self.cfg.model.init_seed

    @property
    def final_loss(self) -> float | None:
        """Held-out loss after the last step, nats a token; None unless finished and finite."""
        return finite_number((self.summary or {}).get("heldout_loss"))

    def series(self, name: str) -> Series:
        """A metric by its full name; empty if it was never logged."""
        rows = [(line["tokens"], line[name]) for line in self.lines if name in line]
        tokens = np.array([t for t, _ in rows], dtype=np.int64)
        return Series(tokens, np.array([v for _, v in rows], dtype=np.float64))

    def by_layer(self, quantity: str) -> Series:
        """`<quantity>/layer_00`, ... as one (n, L) array; empty, (0, 0), if never logged."""
        prefix = f"{quantity}/layer_"
        names = [name for name in self.names if name.startswith(prefix)]
        names.sort(key=lambda name: int(name.removeprefix(prefix)))
        lines = [line for line in self.lines if all(name in line for name in names)]
        if not names or not lines:
            return Series(np.zeros(0, np.int64), np.zeros((0, 0)))
        tokens = np.array([line["tokens"] for line in lines], dtype=np.int64)
        values = [[line[name] for name in names] for line in lines]
        return Series(tokens, np.array(values, dtype=np.float64))

    @cached_property
    def names(self) -> set[str]:
        """Every metric that some line holds."""
        return {name for line in self.lines for name in line}


def load_run(path: Path) -> Run:
    """Read a run directory, finished or not.

    A last line of metrics.jsonl that was cut short is left out; what else cannot be read there is
    counted.

    Raises:
        CheckpointError: it is not a run directory of this version.
    """
    cfg = load_run_config(path)
    try:
        text = (path / "metrics.jsonl").read_text(errors="replace")
    except FileNotFoundError:
        text = ""
    except OSError as error:
        raise CheckpointError(f"{path}/metrics.jsonl: {error.strerror}") from error
    complete, _, cut_short = text.rpartition("\n")
    read = [metrics_line(line) for line in complete.splitlines()]
    last = metrics_line(cut_short)
    lines = [line for line in (*read, last) if line is not None]
    return Run(
        path,
        cfg,
        read_object(path / "run.json") or {},
        read_object(path / "summary.json"),
        lines,
        read.count(None),
    )


def metrics_line(text: str) -> dict[str, Any] | None:
    """Step, tokens and the numbers and nulls of a line; None if it is no line of ours."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not all(type(line.get(k)) is int for k in ("step", "tokens")):
        return None
    return {k: v for k, v in line.items() if v is None or type(v) in (int, float)}


def finite_number(value: Any) -> float | None:
    """A JSON value as a float; None for NaN, infinity and what is no number."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, None where there is no file; raises CheckpointError."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value
