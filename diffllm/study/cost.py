"""What a study costs: runs, tokens, FLOPs, and hours at a speed that is measured here."""

import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from diffllm.config.matching import totals
from diffllm.run.directory import summary_of
from diffllm.study.command import first_runs
from diffllm.study.file import Study
from diffllm.study.runs import (
    Planned,
    config_of,
    deciding_run,
    is_ended,
    rate_run,
    without_length,
)

PROBE_STEPS = 6
PROBE_S = 300
"""Seconds after which a probe is given up."""


@dataclass(frozen=True)
class Cost:
    """The runs of one arm in one stage."""

    stage: str
    arm: str
    runs: int
    ended: int
    """Those that are there already."""
    tokens: float
    """Of each run."""
    flops: float
    """Training FLOPs of each run."""
    tokens_per_s: float | None
    """None where it was not measured."""

    @property
    def hours(self) -> float | None:
        """Of the runs that are still to be made, one after another."""
        left = (self.runs - self.ended) * self.tokens
        return left / self.tokens_per_s / 3600 if self.tokens_per_s else None


def costs(study: Study, out: Path, probe: bool) -> list[Cost]:
    """The cost of every arm: first of choosing its learning rate, where the study does, without
    extensions of the grid; then of deciding.

    Args:
        out: where runs that have ended say how fast they were.
        probe: whether a few steps are trained for an arm that has none.
    """
    found = []
    for first in first_runs(study):
        stages: list[list[Planned]] = []
        if study.lr:
            rates, seeds = study.lr.grid, study.lr.seeds
            stages.append([rate_run(study, first.arm, s, lr) for lr in rates for s in seeds])
        stages.append([deciding_run(study, first.arm, seed, first.lr) for seed in study.seeds])
        speed = speed_of([run for runs in stages for run in runs], out)
        if speed is None and probe:
            speed = probed(first)
        for runs in stages:
            cfg = config_of(runs[0])
            tokens = cfg.steps * cfg.global_batch_size * cfg.seq_len
            ended = sum(is_ended(out / run.name, config_of(run)) for run in runs)
            flops = tokens * totals(cfg.model)["flops"]
            found.append(Cost(runs[0].stage, first.arm, len(runs), ended, tokens, flops, speed))
    return found


def speed_of(runs: list[Planned], out: Path) -> float | None:
    """Tokens a second of the runs that have ended, evaluations and saves counted; None where none
    says so."""
    speeds = []
    for run in runs:
        summary = summary_of(out / run.name) or {}
        if summary.get("seconds") and summary.get("tokens"):
            speeds.append(summary["tokens"] / summary["seconds"])
    return statistics.median(speeds) if speeds else None


def probed(planned: Planned) -> float | None:
    """Tokens a second of a few steps of this run, in a process and a directory of its own; None if
    they do not end."""
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
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=PROBE_S)
        except (subprocess.SubprocessError, OSError):
            return None
        return (summary_of(path) or {}).get("tokens_per_s")
