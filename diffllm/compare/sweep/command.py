"""The command `train.py -m`: plan the runs of a sweep, start them, and compare the results."""

import math
import os
import shlex
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffllm.compare.sweep.cluster import ClusterLauncher, ranks_of_runs
from diffllm.compare.sweep.directory import MESSAGE_WORDS, SweepDirectory
from diffllm.compare.sweep.job import Ending, Job, Stops, path_for_jobs
from diffllm.compare.sweep.plan import (
    experiment_words,
    plan_sweep,
    split_overrides,
)
from diffllm.core.atomic_directories import reserve
from diffllm.core.errors import CheckpointError, UserError
from diffllm.core.files import take_back
from diffllm.core.printing import echo
from diffllm.distributed.launcher import stopped_status
from diffllm.distributed.world import DistributedConfig, World, join
from diffllm.metrics.display import duration
from diffllm.metrics.records import finite, read_ending, read_record, stopped_text
from diffllm.metrics.wandb_config import RUN_ID
from diffllm.metrics.wandb_directories import ALL_OFFLINE_RUNS, OFFLINE_RUNS, wandb_parent

Run = dict[str, Any]
Place = tuple[SweepDirectory, ClusterLauncher | None]


def run_sweep(words: list[str], config_dirs: list[Path]) -> tuple[int, dict[str, Any] | None]:
    """Execute all unfinished runs of the sweep with the overrides `words`, and print the results.

    A sweep has one run per combination of swept values. The override run.sweep=<name> resumes an
    earlier sweep. A failed run does not stop the remaining runs. Raises ConfigError before any run
    starts if a config is invalid.

    Returns:
        The exit status and, on rank 0, the values that --json prints. The status is 0 if all runs
        are finished. If a signal stopped the sweep, the status is the result of `stopped_status`.
        Otherwise it is 1.
    """
    world = join_ranks()
    runs, planned = world.broadcast_and_keep(
        "sweep", lambda: plan_runs(words, config_dirs, world.size)
    )
    jobs = [Job(**run) for run in runs]
    to_run = [job for job in jobs if not job.finished]
    if planned is None:
        run_here(to_run, world)
        return 0, None
    directory, cluster = planned
    announce(jobs, directory)
    earlier = Pace.of_summaries(job for job in jobs if job.finished)
    try:
        if cluster:
            stopped, endings = cluster.run(to_run, directory)
        else:
            stopped, endings = run_here(to_run, world, earlier)
    except UserError:  # The cluster did not accept the jobs.
        directory.withdraw()
        raise
    unfinished = print_outcomes(jobs, endings, directory)
    # A scheduler's signal leaves too little time for a comparison.
    by_user = stopped == signal.SIGINT and unfinished < len(jobs)
    files = write_comparison(directory.path) if by_user or not stopped else []
    print_upload(directory.path)
    content = {
        "sweep": str(directory.path),
        "signal": signal.Signals(stopped).name if stopped else None,
        "runs": [run_values(job.path, endings.get(job.name)) for job in jobs],
        "files": files,
    }
    if stopped:
        return stopped_status(stopped), content
    return 1 if unfinished else 0, content


def plan_runs(words: list[str], config_dirs: list[Path], ranks: int) -> tuple[list[Run], Place]:
    own, launcher = split_overrides([*experiment_words(words), *words])
    names = [o for o in own if o.get_key_element() == "run.sweep"]
    path = Path("outputs", f"sweep-{time.strftime('%Y%m%d-%H%M%S')}")
    created: list[Path] = []
    if not names:
        path, created = reserve(path, *MESSAGE_WORDS)
        names = split_overrides([f"run.sweep={path.name}"])[0]
        own += names
    try:
        cluster = ClusterLauncher.of(launcher, ranks, str(names[0].input_line))
        directory, runs = plan_sweep(own, *ranks_of_runs(cluster, ranks), created)
    except BaseException:  # also Ctrl-C
        take_back(path, created)
        raise
    flags = [word for path in config_dirs for word in ("--config-dir", str(path))]
    return [{**run, "words": [*flags, *run["words"]]} for run in runs], (directory, cluster)


def join_ranks() -> World:
    """Join the process group of torchrun, if any, and return the rank and world size.

    Also set environment variables for the child processes of all runs, such as PYTHONPATH.
    """
    os.environ["PYTHONPATH"] = path_for_jobs()
    world = join(DistributedConfig())
    if world.size > 1:  # Runs rendezvous through the store of this process.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return world


@dataclass
class Pace:
    """Seconds and training FLOPs of finished runs that follow each other on this machine."""

    seconds: float = 0.0
    flops: float = 0.0

    @classmethod
    def of_summaries(cls, jobs: Iterable[Job]) -> "Pace":
        """Add up finished runs of earlier starts, of which only the training time is known."""
        pace = cls()
        for job in jobs:
            summary = read_ending(Path(job.path)) or {}
            seconds, steps = finite(summary.get("seconds")), finite(summary.get("steps"))
            if seconds and steps:
                pace.add(seconds, job.flops_of_step * steps)
        return pace

    def add(self, seconds: float, flops: float) -> None:
        self.seconds += seconds
        self.flops += flops

    def eta(self, jobs: list[Job]) -> str:
        """Estimate the time of the remaining runs `jobs`; return "" if no run has finished.

        The estimate assumes that these runs make as many training FLOPs per second as the finished
        runs. Steps before a run's newest checkpoint are not repeated.
        """
        if not self.flops:
            return ""
        flops = sum(job.flops_of_step * (job.steps - job.saved_step) for job in jobs)
        runs = "1 run" if len(jobs) == 1 else f"{len(jobs)} runs"
        eta = duration(self.seconds * flops / self.flops)
        return f"{runs} left, ETA {eta} (at the training FLOPs per second of the finished runs)"


def run_here(
    jobs: list[Job], world: World, earlier: Pace | None = None
) -> tuple[int, dict[str, Ending]]:
    """Execute `jobs` one after the other in this process's group of ranks.

    Args:
        earlier: pace of the runs that finished before this start, used for the remaining time until
            the first of `jobs` has finished.

    Returns:
        The number of the received signal (0 for none), and {job name: how the job ended}.
    """
    endings: dict[str, Ending] = {}
    pace, first_step = Pace(), 0
    with Stops() as stops:
        for index, job in enumerate(jobs):
            if world.rank == 0 and not job.quiet:
                echo(f"\nrun {job.number} of {job.total}: {job.name}", flush=True)
                known = pace if pace.flops else earlier
                if known and (eta := known.eta(jobs[index:])):
                    echo(eta, flush=True)
                first_step = job.saved_step
            start = time.monotonic()
            endings[job.name] = ending = stops.run(job, world.rank)
            if world.rank == 0 and ending.state == "finished":
                steps = job.saved_step - first_step
                pace.add(time.monotonic() - start, job.flops_of_step * steps)
            if world.rank == 0 and ending.state == "failed" and not job.quiet:
                echo(f"{job.path} failed, {ending.reason}", flush=True)
            if stops.received:
                break
    return stops.received, endings


def announce(jobs: list[Job], directory: SweepDirectory) -> None:
    done = [job for job in jobs if job.finished]
    others = f", {len(done)} already finished" if done else ""
    echo(f"sweep {directory.path}: {len(jobs)} runs{others}", flush=True)


def print_outcomes(jobs: list[Job], endings: dict[str, Ending], directory: SweepDirectory) -> int:
    width = max(len(job.path) for job in jobs)
    echo()
    failed = unfinished = 0
    for job in jobs:
        ending = endings.get(job.name, Ending("not started"))
        try:
            summary = read_ending(Path(job.path))
        except CheckpointError as error:
            summary, ending = None, Ending("failed", str(error))
        if summary:
            result = loss_words(summary)
        else:
            unfinished += 1
            failed += ending.state == "failed"
            state = ending.state.replace("failed", "FAILED")
            result = ", ".join(filter(None, [state, ending.reason]))
        echo(f"{job.path:<{width}}  {result}")
        if ending.state == "failed":
            echo(f"{'':<{width}}  log {job.log}")
    if unfinished:
        lost = f", {failed} failed" if failed else ""
        named = f" with run.sweep={directory.path.name}" * (directory.kind == "sweep")
        again = f"the same command{named} resumes them"
        echo(f"{unfinished} of {len(jobs)} runs did not finish{lost}; {again}")
    return unfinished


def run_values(path: str, ending: Ending | None) -> dict[str, Any]:
    """Return the values that --json prints for a run of a sweep or study.

    `ending` is None if this launch did not start the run.
    """
    ending = ending or Ending("not started")
    state, reason = ending.state, ending.reason
    try:
        summary = read_ending(Path(path))
    except CheckpointError as error:
        summary, state, reason = None, "failed", str(error)
    if summary:
        state, reason = "finished", ""
        if summary.get("stopped"):
            state, reason = "diverged", stopped_text(summary)
    return {"run": path, "state": state, "reason": reason or None, "summary": summary}


def print_upload(directory: Path) -> None:
    """Print one command that uploads the offline wandb runs of a sweep or study, if any exist."""
    parent = wandb_parent(directory)
    if parent == directory:
        patterns = [f"{depth}{ALL_OFFLINE_RUNS}" for depth in ("", "*/", "*/*/")]
    else:  # WANDB_DIR may contain offline runs of other sweeps.
        patterns = [f"{OFFLINE_RUNS}-{run_id}" for run_id in wandb_ids(directory)]
    place = shlex.quote(str(parent))
    paths = [f"{place}/{pattern}" for pattern in patterns if any(parent.glob(pattern))]
    if paths:
        echo(f"wandb: offline; `wandb sync {' '.join(paths)}` uploads all runs")


def wandb_ids(directory: Path) -> list[str]:
    """Return the ids in wandb of the comparison and of all runs in a sweep or study directory."""
    from diffllm.compare.wandb_runs import stored_comparison_id

    ids = [stored_comparison_id(directory)]
    for file in sorted([*directory.glob("*/run.json"), *directory.glob("*/*/run.json")]):
        with suppress(CheckpointError):
            ids.append((read_record(file) or {}).get("wandb_id"))
    return [run_id for run_id in ids if run_id and RUN_ID.fullmatch(run_id)]


def loss_words(summary: dict[str, Any]) -> str:
    if summary.get("stopped"):
        return f"diverged, {stopped_text(summary)}"
    loss, bits = (summary.get(f"heldout_{name}") for name in ("loss", "bits_per_byte"))
    if loss is None or not math.isfinite(loss):
        return "diverged: no finite held-out loss"
    in_bits = "" if bits is None else f", {bits:.3f} bits per byte"
    return f"held-out loss {loss:.4f}{in_bits}"


def write_comparison(directory: Path) -> list[str]:
    """Print a comparison of a sweep's runs, write it to files, and return the paths of the files.

    Never raises an exception; errors are printed.
    """
    wanted, files = "comparison of the runs", []
    try:
        from diffllm.compare.report.comparison import read
        from diffllm.compare.report.page import write
        from diffllm.compare.report.terminal import whole_text
        from diffllm.compare.wandb_runs import record_gaps

        comparison, _ = read([directory])
        echo(f"\n{whole_text(comparison)}\n")
        page, table = write(comparison, directory)
        echo(f"comparison {page}, {table}")
        files = [str(page), str(table)]
        wanted = "gaps in wandb"
        record_gaps(comparison, directory)
    except Exception as error:
        echo(f"no {wanted}: {' '.join(str(error).split()) or type(error).__name__}")
    return files
