"""The stages of a study: runs that choose learning rates, if it does so, then deciding runs."""

import statistics
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from diffllm.compare.report.runs import find_runs
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import (
    Planned,
    choose_all,
    config_of_planned,
    deciding_runs,
    is_ended,
    rate_run,
    start_words,
    strayed,
)
from diffllm.compare.sweep.cluster import ClusterLauncher
from diffllm.compare.sweep.command import Place, join_ranks, run_here
from diffllm.compare.sweep.job import Job
from diffllm.compare.sweep.plan import SweepDirectory
from diffllm.config.matching import totals
from diffllm.config.saved import load_run_config, plugin_changes
from diffllm.config.schema import what_differs
from diffllm.core.errors import ConfigError
from diffllm.core.printing import echo
from diffllm.data.progress import track
from diffllm.metrics.records import finite, read_summary


def run_study(study: Study, out: Path, launcher: list[str], added: list[str]) -> int:
    """Run everything that has not ended, stage by stage; a started run resumes.

    Args:
        launcher: the overrides hydra/launcher=... and hydra.launcher.*.
        added: plugins and --config-dir, for the command lines of the runs.

    Returns:
        0 if every run has ended and every arm has a learning rate, 128 + n after signal n, else 1.

    Raises:
        ConfigError: a study that cannot run; nothing has been started or changed.
    """
    world = join_ranks()

    def begin() -> Place:
        cluster = ClusterLauncher.of(launcher, world.size, f"run.sweep={out.name}")
        check_study_runs(study, out, cluster.world_size if cluster else world.size)
        directory = SweepDirectory(out)
        directory.hold()
        return directory, cluster

    _, place = world.broadcast_and_keep("study", lambda: (None, begin()))
    failed: list[str] = []
    stopped = 0

    def stage() -> list[dict[str, Any]]:
        assert place
        return [] if failed or stopped else next_jobs(study, place[0], added)

    for number in count():
        jobs = [Job(**job) for job in world.broadcast_from_rank0(f"stage/{number}", stage)]
        if not jobs:
            break
        if place is None:
            run_here(jobs, world)
            continue
        echo(f"{out}: {len(jobs)} runs to go in this stage", flush=True)
        directory, cluster = place
        stopped, endings = cluster.run(jobs, directory) if cluster else run_here(jobs, world)
        for job in (job for job in jobs if not is_ended(Path(job.path))):
            failed.append(job.name)
            ending = endings.get(job.name)
            echo(f"{job.path}: {ending.state if ending else 'not started'}")
    if place is None:
        return 0
    if failed or stopped:
        echo(f"{len(failed)} runs did not end; the same command goes on with them")
        return 128 + stopped if stopped else 1
    diverged = [choice for choice in choose_all(study, out) if choice.lr is None]
    for choice in diverged:
        rates = ", ".join(f"{lr:g}" for lr in choice.losses)
        echo(f"arm {choice.arm} diverged at every learning rate ({rates}): it has no deciding run")
    which = "all other runs" if diverged else "all runs"
    echo(f"{which} of {out} have ended: diffllm study verdict {study.path} out={out}")
    return 1 if diverged else 0


def next_jobs(study: Study, directory: SweepDirectory, added: list[str]) -> list[dict[str, Any]]:
    out, jobs = directory.path, []
    runs = next_runs(study, out)
    with track("checking runs", len(runs)) as advance:
        for number, planned in enumerate(runs, start=1):
            words = start_words(study, planned, out)
            directory.record["runs"][planned.name] = words
            path, steps = str(out / planned.name), config_of_planned(planned).steps
            arguments = [*added, *words]
            jobs.append(vars(Job(number, len(runs), planned.name, path, steps, arguments, False)))
            advance(1)
    directory.record["keys"] = []
    directory.write()
    return jobs


def next_runs(study: Study, out: Path) -> list[Planned]:
    """Return the runs of the next stage that have not ended."""
    choices = choose_all(study, out)
    if wanted := [run for choice in choices for run in choice.wanted]:
        return wanted
    rates = {choice.arm: choice.lr for choice in choices}
    runs = [
        run
        for seed in study.seeds
        for arm in study.arms
        if study.lr is None or rates[arm] is not None
        for run in deciding_runs(study, arm, seed, rates.get(arm))
    ]
    return [run for run in runs if not is_ended(out / run.name)]


def check_study_runs(study: Study, out: Path, world_size: int) -> None:
    for planned in first_runs(study):
        cfg = config_of_planned(planned)
        try:
            cfg.check_world(world_size)
        except ConfigError as error:
            raise ConfigError(f"arm {planned.arm}: {error}") from error
    for path in (out / name for name in SweepDirectory(out).record["runs"]):
        if changes := plugin_changes(path):
            raise ConfigError(f"{path} was made with {what_differs(changes)}; choose another out=")
    for planned in next_runs(study, out):
        path = out / planned.name
        if not (path / "config.yaml").is_file():
            continue
        if problem := strayed(path, load_run_config(path), config_of_planned(planned)):
            raise ConfigError(
                f"{path} is a run with another config ({problem}); choose another out="
            )


def first_runs(study: Study) -> list[Planned]:
    """A deciding run of every arm."""
    lr = study.lr.grid[0] if study.lr else None
    return [deciding_runs(study, arm, study.seeds[0], lr)[0] for arm in study.arms]


@dataclass(frozen=True)
class Cost:
    """The runs of one arm in one stage."""

    stage: str
    arm: str
    runs: int
    ended: int
    tokens: int
    """Per run."""
    flops: float
    """Per run."""
    seconds: float | None
    """Per run; None if no speed is known."""

    @property
    def hours(self) -> float | None:
        """Of the remaining runs, one after another."""
        return None if self.seconds is None else (self.runs - self.ended) * self.seconds / 3600


def costs(study: Study, out: Path, pilot: list[Path]) -> list[Cost]:
    """Return the cost of every arm and stage; time follows from FLOPs and the median speed of ended
    runs of the study, or else of the pilot."""
    stages = [runs for first in first_runs(study) for runs in stages_of(study, first)]
    speeds = [s for runs in stages for run in runs if (s := speed_of(out / run.name))]
    if not speeds and pilot:
        speeds = [speed for path in find_runs(pilot).runs if (speed := speed_of(path))]
    found = []
    for runs in stages:
        cfg = config_of_planned(runs[0])
        tokens = cfg.steps * cfg.global_batch_size * cfg.seq_len
        flops = tokens * totals(cfg.model)["flops"]
        ended = sum(is_ended(out / run.name) for run in runs)
        seconds = flops / statistics.median(speeds) if speeds else None
        found.append(Cost(runs[0].stage, runs[0].arm, len(runs), ended, tokens, flops, seconds))
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
    """Training FLOPs per second, evaluations and saves included."""
    summary = read_summary(path) or {}
    seconds, tokens = finite(summary.get("seconds")), finite(summary.get("tokens"))
    if not seconds or not tokens:
        return None
    return tokens * totals(load_run_config(path).model)["flops"] / seconds
