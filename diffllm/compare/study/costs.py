"""Costs of a study: tokens, FLOPs and hours of its runs."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from diffllm.compare.arms.directories import find_runs
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import (
    config_of_planned,
    cost_of_step,
    deciding_runs,
    first_runs,
    is_ended,
    rate_run,
)
from diffllm.config.matching import totals
from diffllm.config.saved import load_run_config
from diffllm.metrics.records import finite, read_summary


@dataclass(frozen=True)
class Cost:
    """Planned tokens, FLOPs and time of one arm in one stage of a study.

    `stage` is "rates" (grid of learning rates) or "deciding" (runs that the rules compare). `runs`
    is the number of planned runs, and `ended` is the number of these that have ended. `tokens`,
    `flops` and `seconds` refer to a single run. `seconds` is None if the speed is unknown.
    `by_profile`: whether `seconds` follows from the step times of the study's profile.
    """

    stage: str
    arm: str
    runs: int
    ended: int
    tokens: int
    flops: float
    seconds: float | None
    by_profile: bool = False

    @property
    def hours(self) -> float | None:
        """Hours to complete all runs that have not ended, one after another; None if unknown."""
        return None if self.seconds is None else (self.runs - self.ended) * self.seconds / 3600


START_S = 20.0
"""Seconds from the launch of a run to its first step; an assumption for GPUs, not measured."""


def costs(study: Study, out: Path, pilot: list[Path], assumed: float | None = None) -> list[Cost]:
    """Estimate the cost of each arm in each stage of a study.

    The time is the planned FLOPs divided by the median speed of the study's finished runs in `out`.
    If no run in `out` is finished, use the finished runs in `pilot` (directories or globs), or else
    the step times of the study's profile, without evaluations and checkpoints. With `assumed`
    FLOP/s, ignore finished runs and the profile, and add START_S per run. With data.mask_documents,
    FLOPs depend on the mean number of keys per attention query. If the config does not determine
    this number, use its median over the same finished runs.
    """
    stages = []
    for first in first_runs(study):
        if study.lr:
            grid, seeds = study.lr.grid, study.lr.seeds
            stages.append([rate_run(study, first.arm, seed, lr) for lr in grid for seed in seeds])
        deciding = [deciding_runs(study, first.arm, seed, first.lr) for seed in study.seeds]
        stages.append([run for runs in deciding for run in runs])
    ended_runs = [s for runs in stages for run in runs if (s := speed_of(out / run.name))]
    if not ended_runs and pilot:
        ended_runs = [speed for path in find_runs(pilot).runs if (speed := speed_of(path))]
    speeds, counted = [speed for speed, _ in ended_runs], [keys for _, keys in ended_runs if keys]
    found = []
    for runs in stages:
        cfg = config_of_planned(runs[0])
        tokens = cfg.steps * cfg.global_batch_size * cfg.seq_len
        keys = cfg.visible_keys
        if keys is None and cfg.data.mask_documents and counted:
            keys = min(statistics.median(counted), (cfg.seq_len + 1) / 2)
        flops = tokens * totals(cfg.model, keys)["flops"]
        ended = sum(is_ended(out / run.name) for run in runs)
        by_profile = not assumed and not speeds and study.profile is not None
        if assumed:
            seconds: float | None = START_S + flops / assumed
        elif by_profile:
            seconds = cfg.steps * cost_of_step(study, runs[0].arm)
        else:
            seconds = flops / statistics.median(speeds) if speeds else None
        stage, arm = runs[0].stage, runs[0].arm
        found.append(Cost(stage, arm, len(runs), ended, tokens, flops, seconds, by_profile))
    return found


def speed_of(path: Path) -> tuple[float, float | None] | None:
    """Return a run's training FLOPs per second, and the mean number of keys per attention query.

    The measured time includes evaluations and checkpoints. The number of keys is None if the run
    did not record it. Return None instead of a tuple if the run has not finished.
    """
    summary = read_summary(path) or {}
    seconds, tokens = finite(summary.get("seconds")), finite(summary.get("tokens"))
    if not seconds or not tokens:
        return None
    cfg, keys = load_run_config(path), finite(summary.get("visible_keys"))
    return tokens * totals(cfg.model, keys or cfg.visible_keys)["flops"] / seconds, keys
