"""The course of a sweep, from its command line to its table."""

import os
import time
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from diffllm.compare.sweep.cluster import ClusterLauncher
from diffllm.compare.sweep.job import Ending, Job, Stops, path_for_jobs
from diffllm.compare.sweep.names import experiment_words, parse
from diffllm.compare.sweep.plan import SweepDirectory, plan_sweep
from diffllm.compare.sweep.report import announce, report, write_comparison
from diffllm.core.errors import InUseError, UserError
from diffllm.core.printing import echo
from diffllm.distributed.world import DistributedConfig, World, join
from diffllm.training.directory import fresh

Run = dict[str, Any]
"""The values of a Job."""
Place = tuple[SweepDirectory, ClusterLauncher | None]


def sweep(words: list[str], config_dirs: list[Path]) -> int:
    """Run every combination that has not ended yet, and say how each ended.

    All configs are checked before the first run starts. A run that fails does not stop the others.
    With run.sweep=<name> an earlier sweep goes on: runs that ended start no process, the others
    resume from their newest checkpoint.

    Args:
        words: the overrides of the command line.
        config_dirs: the directories of its --config-dir, absolute.

    Returns:
        0 if every run has ended, 128 + n if signal n stopped the sweep, else 1.

    Raises:
        ConfigError: a sweep that could not run; nothing has been started or changed.
    """
    world = meet()
    runs, planned = world.broadcast_and_keep("sweep", lambda: plan(words, config_dirs, world.size))
    jobs = [Job(**run) for run in runs]
    to_run = [job for job in jobs if not job.finished]
    if planned is None:
        run_here(to_run, world)
        return 0
    directory, cluster = planned
    announce(jobs, directory)
    try:
        stopped, endings = run_jobs(to_run, world, directory, cluster)
    except UserError:  # there is no such cluster
        directory.withdraw()
        raise
    unfinished = report(jobs, endings, directory)
    if stopped:
        return 128 + stopped
    write_comparison(directory.path)
    return 1 if unfinished else 0


def plan(words: list[str], config_dirs: list[Path], ranks: int) -> tuple[list[Run], Place]:
    """Plan every run of a sweep; choose an unused name if the sweep has none.

    If another sweep takes the name at the same moment, try the next name.
    """
    own, launcher = parse([*experiment_words(words), *words])
    if any(o.get_key_element() == "run.sweep" for o in own):
        return plan_named(own, launcher, config_dirs, ranks)
    path = Path("outputs", f"sweep-{time.strftime('%Y%m%d-%H%M%S')}")
    while True:
        named = [*own, *parse([f"run.sweep={fresh(path).name}"])[0]]
        try:
            return plan_named(named, launcher, config_dirs, ranks)
        except InUseError:
            continue


def plan_named(
    own: list[Override], launcher: list[str], config_dirs: list[Path], ranks: int
) -> tuple[list[Run], Place]:
    """Plan every run of a sweep with a name; return the runs with their overrides, the sweep's
    directory and its cluster, if any."""
    (name,) = (o for o in own if o.get_key_element() == "run.sweep")
    cluster = ClusterLauncher.of(launcher, ranks, str(name.input_line))
    directory, runs = plan_sweep(own, cluster.world_size if cluster else ranks)
    flags = [word for path in config_dirs for word in ("--config-dir", str(path))]
    return [{**run, "words": [*flags, *run["words"]]} for run in runs], (directory, cluster)


def meet() -> World:
    """Join the ranks, and set the environment that all runs inherit."""
    os.environ["PYTHONPATH"] = path_for_jobs()
    world = join(DistributedConfig())
    if world.size > 1:  # the runs meet through the store that this process met through
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return world


def run_jobs(
    jobs: list[Job], world: World, directory: SweepDirectory, cluster: ClusterLauncher | None
) -> tuple[int, dict[str, Ending]]:
    """Run jobs on a cluster or here; return the signal that stopped them or 0, and their endings
    by name."""
    return cluster.run(jobs, directory) if cluster else run_here(jobs, world)


def run_here(jobs: list[Job], world: World) -> tuple[int, dict[str, Ending]]:
    """Run jobs in order; return the signal that stopped them or 0, and their endings by name."""
    endings: dict[str, Ending] = {}
    with Stops() as stops:
        for job in jobs:
            if world.rank == 0:
                echo(f"\nrun {job.number} of {job.total}: {job.name}", flush=True)
            endings[job.name] = ending = stops.run(job, world.rank)
            if world.rank == 0 and ending.state == "failed":
                echo(f"{job.path} failed, {ending.reason}", flush=True)
            if stops.received:
                break
    return stops.received, endings
