"""The cost of a study: runs, tokens and FLOPs, and hours at the speed of runs that have ended."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from diffllm.compare.report.runs import find_runs
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import (
    Planned,
    config_of_planned,
    deciding_runs,
    is_ended,
    rate_run,
)
from diffllm.compare.study.stages import first_runs
from diffllm.config.matching import totals
from diffllm.config.saved import load_run_config
from diffllm.metrics.records import finite, read_summary


@dataclass(frozen=True)
class Cost:
    """The runs of one arm in one stage."""

    stage: str
    arm: str
    runs: int
    ended: int
    """Those that have ended already."""
    tokens: int
    """Tokens that each run trains on."""
    flops: float
    """Training FLOPs of each run."""
    seconds: float | None
    """Time of each run; None if no speed is known."""

    @property
    def hours(self) -> float | None:
        """Time of the remaining runs, one after another."""
        return None if self.seconds is None else (self.runs - self.ended) * self.seconds / 3600


def costs(study: Study, out: Path, pilot: list[Path]) -> list[Cost]:
    """Return the cost of every arm: of choosing its learning rate if the study does so, without
    extensions of the grid, then of deciding.

    The time of a run follows from its FLOPs and a median speed that includes evaluations and saves:
    of the arm's ended runs, or else of all arms' ended runs, or else of the pilot's.

    Args:
        out: directory of the study's runs.
        pilot: runs, directories of runs or globs of them, on this machine.
    """
    stages = {first.arm: stages_of(study, first) for first in first_runs(study)}
    speeds = {
        arm: [speed for runs in found for run in runs if (speed := speed_of(out / run.name))]
        for arm, found in stages.items()
    }
    others = [speed for found in speeds.values() for speed in found]
    if not others and pilot:
        others = [speed for path in find_runs(pilot).runs if (speed := speed_of(path))]
    found = []
    for arm, of_arm in stages.items():
        known = speeds[arm] or others
        for runs in of_arm:
            cfg = config_of_planned(runs[0])
            tokens = cfg.steps * cfg.global_batch_size * cfg.seq_len
            flops = tokens * totals(cfg.model)["flops"]
            ended = sum(is_ended(out / run.name) for run in runs)
            seconds = flops / statistics.median(known) if known else None
            found.append(Cost(runs[0].stage, arm, len(runs), ended, tokens, flops, seconds))
    return found


def stages_of(study: Study, first: Planned) -> list[list[Planned]]:
    """Return the planned runs of an arm by stage.

    Args:
        first: the arm's first deciding run.
    """
    stages = []
    if study.lr:
        grid, seeds = study.lr.grid, study.lr.seeds
        stages.append([rate_run(study, first.arm, seed, lr) for lr in grid for seed in seeds])
    deciding = [deciding_runs(study, first.arm, seed, first.lr) for seed in study.seeds]
    return [*stages, [run for runs in deciding for run in runs]]


def speed_of(path: Path) -> float | None:
    """Return the training FLOPs per second of the run at `path`; None unless it has ended and
    records tokens and seconds."""
    summary = read_summary(path) or {}
    seconds, tokens = finite(summary.get("seconds")), finite(summary.get("tokens"))
    if not seconds or not tokens:
        return None
    return tokens * totals(load_run_config(path).model)["flops"] / seconds
