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
from diffllm.compare.sweep.job import Ending, Job, Stops, path_for_jobs
from diffllm.compare.sweep.runs import experiment_words, plan_sweep, split_overrides
from diffllm.compare.sweep.sweep_directory import MESSAGE_WORDS, SweepDirectory
from diffllm.core.errors import CheckpointError, UserError
from diffllm.core.held_directories import reserve, take_back
from diffllm.core.printing import echo
from diffllm.core.run_files import RunFile, finite, read_ending, read_facts, stopped_text
from diffllm.distributed.launcher import stopped_status
from diffllm.distributed.world import DistributedConfig, World, join
from diffllm.metrics.display import duration
from diffllm.metrics.wandb_config import RUN_ID
from diffllm.metrics.wandb_directories import ALL_OFFLINE_RUNS, OFFLINE_RUNS, wandb_parent

JobFields = dict[str, Any]
"""Keyword arguments of `Job`."""
Place = tuple[SweepDirectory, ClusterLauncher | None]
"""Directory of a sweep or study, and the launcher of its runs; None: the ranks of this launch."""


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
    # Every rank must call this. Rank 0 alone plans: it creates and locks the sweep's directory.
    planned_jobs, place = world.broadcast_and_keep(
        "sweep", lambda: plan_runs(words, config_dirs, world.size)
    )
    jobs = [Job(**fields) for fields in planned_jobs]
    finished_jobs = []
    unfinished_jobs = []
    for job in jobs:
        if job.finished:
            finished_jobs.append(job)
        else:
            unfinished_jobs.append(job)
    # The other ranks only take part in the runs.
    if place is None:
        run_here(unfinished_jobs, world)
        return 0, None
    directory, cluster = place
    announce(len(jobs), len(unfinished_jobs), directory)
    former_pace = Pace.of_summaries(finished_jobs)
    try:
        if cluster:
            stopped, endings = cluster.run(unfinished_jobs, directory)
        else:
            stopped, endings = run_here(unfinished_jobs, world, former_pace)
    except UserError:  # The cluster did not accept the jobs.
        directory.withdraw()
        raise
    unfinished = print_outcomes(jobs, endings, directory)
    # A scheduler's signal leaves too little time for a comparison.
    is_stopped_by_user = stopped == signal.SIGINT and unfinished < len(jobs)
    files: list[str] = []
    if not stopped or is_stopped_by_user:
        files = write_comparison(directory.path)
    print_upload(directory.path)
    names = [job.name for job in jobs]
    content = launch_values(directory, names, endings, stopped)
    content["files"] = files
    if stopped:
        return stopped_status(stopped), content
    return 1 if unfinished else 0, content


def plan_runs(
    words: list[str], config_dirs: list[Path], world_size: int
) -> tuple[list[JobFields], Place]:
    """Plan the sweep with the overrides `words`, in a new directory if run.sweep is not set."""
    overrides, launcher = split_overrides([*experiment_words(words), *words])
    sweep_overrides = [o for o in overrides if o.get_key_element() == "run.sweep"]
    date = time.strftime("%Y%m%d-%H%M%S")
    path = Path("outputs", f"sweep-{date}")
    created_paths: list[Path] = []
    if not sweep_overrides:
        # Two sweeps that start in the same second get different names.
        path, created_paths = reserve(path, *MESSAGE_WORDS)
        sweep_overrides, _ = split_overrides([f"run.sweep={path.name}"])
        overrides += sweep_overrides
    try:
        cluster = ClusterLauncher.of(launcher, world_size, str(sweep_overrides[0].input_line))
        ranks = ranks_of_runs(cluster, world_size)
        directory, jobs = plan_sweep(overrides, *ranks, created_paths)
    except BaseException:  # Ctrl-C must not leave an empty directory either.
        take_back(path, created_paths)
        raise
    flags = []
    for config_dir in config_dirs:
        flags += ["--config-dir", str(config_dir)]
    for fields in jobs:
        fields["words"] = [*flags, *fields["words"]]
    return jobs, (directory, cluster)


def join_ranks() -> World:
    """Join the process group of torchrun, if any, and return the rank and world size.

    Also set environment variables for the child processes of all runs, such as PYTHONPATH.
    """
    os.environ["PYTHONPATH"] = path_for_jobs()
    world = join(DistributedConfig())
    if world.size > 1:
        # Runs rendezvous through the store of this process.
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
            seconds = finite(summary.get("seconds"))
            steps = finite(summary.get("steps"))
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
        flops = 0.0
        for job in jobs:
            flops += job.flops_of_step * (job.steps - job.saved_step)
        runs = "1 run" if len(jobs) == 1 else f"{len(jobs)} runs"
        eta = duration(self.seconds * flops / self.flops)
        return f"{runs} left, ETA {eta} (at the training FLOPs per second of the finished runs)"


def run_here(
    jobs: list[Job], world: World, former_pace: Pace | None = None
) -> tuple[int, dict[str, Ending]]:
    """Execute `jobs` one after the other in this process's group of ranks.

    Args:
        former_pace: pace of the runs that finished before this start, used for the remaining time
            until the first of `jobs` has finished.

    Returns:
        The number of the received signal (0 for none), and {job name: how the job ended}.
    """
    endings: dict[str, Ending] = {}
    pace = Pace()
    first_step = 0
    with Stops() as stops:
        for index, job in enumerate(jobs):
            is_printed = world.rank == 0 and not job.quiet
            if is_printed:
                echo(f"\nrun {job.number} of {job.total}: {job.name}", flush=True)
                # The pace of this start includes the launch of each run, so it is preferred.
                eta_pace = pace if pace.flops else former_pace
                eta = eta_pace.eta(jobs[index:]) if eta_pace else ""
                if eta:
                    echo(eta, flush=True)
                first_step = job.saved_step
            start = time.monotonic()
            ending = stops.run(job, world.rank)
            endings[job.name] = ending
            if world.rank == 0 and ending.state == "finished":
                # A resumed run makes only the steps after its checkpoint.
                steps = job.saved_step - first_step
                pace.add(time.monotonic() - start, job.flops_of_step * steps)
            if is_printed and ending.state == "failed":
                echo(f"{job.path} failed, {ending.reason}", flush=True)
            # A signal that reached only the child process stops this run, but not the next runs.
            if stops.received:
                break
    return stops.received, endings


def announce(runs: int, unfinished: int, directory: SweepDirectory) -> None:
    finished = runs - unfinished
    suffix = f", {finished} already finished" if finished else ""
    echo(f"sweep {directory.path}: {runs} runs{suffix}", flush=True)


def print_outcomes(jobs: list[Job], endings: dict[str, Ending], directory: SweepDirectory) -> int:
    """Print how each run ended; return the number of runs without a summary."""
    width = max(len(job.path) for job in jobs)
    echo()
    failed = unfinished = 0
    for job in jobs:
        summary, ending = read_outcome(Path(job.path), endings.get(job.name))
        if summary:
            result = loss_words(summary)
        else:
            unfinished += 1
            failed += ending.state == "failed"
            result = ending.state.replace("failed", "FAILED")
            if ending.reason:
                result += f", {ending.reason}"
        echo(f"{job.path:<{width}}  {result}")
        if ending.state == "failed":
            echo(f"{'':<{width}}  log {job.log}")
    if unfinished:
        failures = f", {failed} failed" if failed else ""
        override = f" with run.sweep={directory.path.name}" if directory.kind == "sweep" else ""
        echo(
            f"{unfinished} of {len(jobs)} runs did not finish{failures}; "
            f"the same command{override} resumes them"
        )
    return unfinished


def read_outcome(path: Path, ending: Ending | None) -> tuple[dict[str, Any] | None, Ending]:
    """Return the summary of a run, if any, and how the run ended.

    `ending` is None if this launch did not start the run. An unreadable summary is a failure.
    """
    try:
        return read_ending(path), ending or Ending("not started")
    except CheckpointError as error:
        return None, Ending("failed", str(error))


def launch_values(
    directory: SweepDirectory, names: Iterable[str], endings: dict[str, Ending], stopped: int
) -> dict[str, Any]:
    """Return the values that --json prints for a launch of a sweep or study.

    Args:
        names: names of the runs.
        endings: how the runs that this launch has started ended, by name.
        stopped: number of the received signal; 0 for none.
    """
    runs = []
    for name in names:
        path = directory.path / name
        summary, ending = read_outcome(path, endings.get(name))
        state, reason = ending.state, ending.reason or None
        if summary:
            state, reason = "finished", None
            if summary.get("stopped"):
                state, reason = "diverged", stopped_text(summary)
        runs.append({"run": str(path), "state": state, "reason": reason, "summary": summary})
    signal_name = signal.Signals(stopped).name if stopped else None
    return {directory.kind: str(directory.path), "signal": signal_name, "runs": runs}


def print_upload(directory: Path) -> None:
    """Print one command that uploads the offline wandb runs of a sweep or study, if any exist."""
    parent = wandb_parent(directory)
    # The runs of a sweep are one level deep, those of a study's grid two levels.
    patterns = [ALL_OFFLINE_RUNS, f"*/{ALL_OFFLINE_RUNS}", f"*/*/{ALL_OFFLINE_RUNS}"]
    if parent != directory:
        # WANDB_DIR may contain offline runs of other sweeps.
        patterns = [f"{OFFLINE_RUNS}-{run_id}" for run_id in wandb_ids(directory)]
    # The shell expands the patterns, so only the directory is quoted.
    directory_word = shlex.quote(str(parent))
    paths = []
    for pattern in patterns:
        if any(parent.glob(pattern)):
            paths.append(f"{directory_word}/{pattern}")
    if paths:
        echo(f"wandb: offline; `wandb sync {' '.join(paths)}` uploads all runs")


def wandb_ids(directory: Path) -> list[str]:
    """Return the ids in wandb of the comparison and of all runs in a sweep or study directory."""
    from diffllm.compare.wandb_runs import stored_comparison_id

    ids = [stored_comparison_id(directory)]
    files = [*directory.glob(f"*/{RunFile.FACTS}"), *directory.glob(f"*/*/{RunFile.FACTS}")]
    for file in sorted(files):
        with suppress(CheckpointError):
            ids.append(read_facts(file.parent).get("wandb_id"))
    return [run_id for run_id in ids if run_id and RUN_ID.fullmatch(run_id)]


def loss_words(summary: dict[str, Any]) -> str:
    if summary.get("stopped"):
        return f"diverged, {stopped_text(summary)}"
    loss = summary.get("heldout_loss")
    if loss is None or not math.isfinite(loss):
        return "diverged: no finite held-out loss"
    bits = summary.get("heldout_bits_per_byte")
    bits_text = "" if bits is None else f", {bits:.3f} bits per byte"
    return f"held-out loss {loss:.4f}{bits_text}"


def write_comparison(directory: Path) -> list[str]:
    """Print a comparison of a sweep's runs, write it to files, and return the paths of the files.

    Never raises an exception; errors are printed.
    """
    content = "comparison of the runs"
    files = []
    try:
        # Slow imports, which a sweep does not need before its end. A failure is printed like other
        # errors: the runs are finished.
        from diffllm.compare.report.comparison import read
        from diffllm.compare.report.report_page import write_page
        from diffllm.compare.report.terminal import whole_text
        from diffllm.compare.wandb_runs import record_gaps

        comparison, _ = read([directory])
        echo(f"\n{whole_text(comparison)}\n")
        page, table = write_page(comparison, directory)
        echo(f"comparison {page}, {table}")
        files = [str(page), str(table)]
        content = "gaps in wandb"
        record_gaps(comparison, directory)
    except Exception as error:
        echo(f"no {content}: {' '.join(str(error).split()) or type(error).__name__}")
    return files
