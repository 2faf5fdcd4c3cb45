"""The cost of a study: runs, tokens, FLOPs, and hours at a speed that is measured here."""

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from diffllm.config import TrainConfig
from diffllm.config.matching import totals
from diffllm.data import heldout_tokens, prepare
from diffllm.files.records import read_summary
from diffllm.report.numbers import finite
from diffllm.study.command import first_runs
from diffllm.study.file import Study
from diffllm.study.runs import (
    Planned,
    config_of,
    deciding_runs,
    is_ended,
    rate_run,
    without_length,
)

PROBE_STEPS = 6
PROBE_S = 300
"""Seconds after which a probe is given up."""
FORWARD = 1 / 3
"""Cost of a token that is evaluated, over that of one that is trained on."""


@dataclass(frozen=True)
class Cost:
    """The runs of one arm in one stage."""

    stage: str
    arm: str
    runs: int
    ended: int
    """Those that are there already."""
    tokens: int
    """Tokens that each run trains on."""
    flops: float
    """Training FLOPs of each run."""
    seconds: float | None
    """Time of each run; None where no speed was measured."""

    @property
    def hours(self) -> float | None:
        """Time of the runs that are still to be made, one after another."""
        return None if self.seconds is None else (self.runs - self.ended) * self.seconds / 3600


@dataclass(frozen=True)
class Pace:
    """The speed of a run on this machine."""

    tokens_per_s: float
    start_s: float
    """Seconds before its first step and after its last."""

    def seconds(self, cfg: TrainConfig) -> float:
        """Reckon the time of a run: start, steps and evaluations."""
        return self.start_s + (tokens_of(cfg) + FORWARD * evaluated(cfg)) / self.tokens_per_s


def costs(study: Study, out: Path, probe: bool) -> list[Cost]:
    """The cost of every arm: first of choosing its learning rate, where the study does, without
    extensions of the grid; then of deciding.

    Args:
        out: the directory of the study's runs.
        probe: whether a few steps are trained for every arm; without, its speed is that of its runs
            that have ended, evaluations and saves counted, starts not.
    """
    found = []
    for first in first_runs(study):
        stages: list[list[Planned]] = []
        if study.lr:
            grid, seeds = study.lr.grid, study.lr.seeds
            stages.append([rate_run(study, first.arm, s, lr) for lr in grid for s in seeds])
        seeds = study.seeds
        stages.append([r for s in seeds for r in deciding_runs(study, first.arm, s, first.lr)])
        pace = probed(first) if probe else None
        a_token = seconds_a_token([run for runs in stages for run in runs], out)
        for runs in stages:
            cfg = config_of(runs[0])
            tokens = tokens_of(cfg)
            ended = sum(is_ended(out / run.name) for run in runs)
            flops = tokens * totals(cfg.model)["flops"]
            if pace:
                seconds: float | None = pace.seconds(cfg)
            else:
                seconds = tokens * a_token if a_token else None
            found.append(Cost(runs[0].stage, first.arm, len(runs), ended, tokens, flops, seconds))
    return found


def tokens_of(cfg: TrainConfig) -> int:
    return cfg.steps * cfg.global_batch_size * cfg.seq_len


def evaluated(cfg: TrainConfig) -> int:
    """Tokens of all evaluations of a run, the last one over documents among them."""
    data = prepare(cfg.data, cfg.prepare)
    split = data.split("heldout")
    sample = min(cfg.eval.sequences * cfg.seq_len, len(split))
    rounds = -(-cfg.steps // cfg.eval.interval)
    return rounds * sample + heldout_tokens(split, data.manifest.eos_id, cfg.eval.tokens)


def seconds_a_token(runs: list[Planned], out: Path) -> float | None:
    """Median time of a token over the runs that have ended; None where none says so."""
    found = []
    for run in runs:
        summary = read_summary(out / run.name) or {}
        seconds, tokens = finite(summary.get("seconds")), finite(summary.get("tokens"))
        if seconds and tokens:
            found.append(seconds / tokens)
    return statistics.median(found) if found else None


def probed(planned: Planned) -> Pace | None:
    """Train a few steps of this run, in a process and a directory of its own; None if they do not
    end."""
    prepare(config_of(planned).data)  # is done once, and is no part of a start
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "probe"
        words = [*without_length(planned.words), f"steps={PROBE_STEPS}", "log_interval=1"]
        words += [
            f"run.dir={path}",
            "run.report=false",
            "wandb.mode=disabled",
            "eval.tokens=1",
        ]
        command = [sys.executable, "-P", "-m", "diffllm", "train", *words]
        began = time.perf_counter()
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=PROBE_S)
        except (subprocess.SubprocessError, OSError):
            return None
        took = time.perf_counter() - began
        summary = read_summary(path) or {}
        speed = summary.get("tokens_per_s")
        return Pace(speed, took - summary["seconds"]) if speed else None
