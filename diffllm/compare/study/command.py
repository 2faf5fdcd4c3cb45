"""The course of a study: learning rates first, where it chooses them, then the runs that decide."""

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from diffllm.compare.study.file import Study
from diffllm.compare.study.rates import choose_all
from diffllm.compare.study.runs import (
    Planned,
    config_of,
    deciding_runs,
    is_ended,
    strayed,
    words_of,
)
from diffllm.compare.sweep.cluster import ClusterLauncher
from diffllm.compare.sweep.command import meet, run_jobs
from diffllm.compare.sweep.job import Job
from diffllm.compare.sweep.plan import SweepDirectory
from diffllm.config.saved import load_run_config, plugin_changes
from diffllm.config.schema import what_differs
from diffllm.core.errors import ConfigError
from diffllm.core.printing import echo
from diffllm.data.progress import track
from diffllm.distributed.world import World


@dataclass
class Course:
    """A study under way, as rank 0 sees it."""

    study: Study
    out: Path
    directory: SweepDirectory
    cluster: ClusterLauncher | None
    added: list[str]
    """Words that every run's command line has besides: plugins, and --config-dir."""
    failed: list[str] = field(default_factory=list)
    """Runs that did not end."""
    stopped: int = 0
    """The signal that stopped the study."""

    def stage(self) -> list[dict[str, Any]]:
        """The jobs that come next; none once all have ended, or one could not."""
        runs = [] if self.failed or self.stopped else next_runs(self.study, self.out)
        jobs = []
        with track("checking runs", len(runs)) as advance:
            for number, planned in enumerate(runs, start=1):
                words = words_of(self.study, planned, self.out)
                self.directory.record["runs"][planned.name] = words
                jobs.append(
                    {
                        "number": number,
                        "total": len(runs),
                        "name": planned.name,
                        "path": str(self.out / planned.name),
                        "steps": config_of(planned).steps,
                        "words": [*self.added, *words],
                        "finished": False,
                    }
                )
                advance(1)
        self.directory.record["keys"] = []
        self.directory.write()
        return jobs

    def run(self, jobs: list[Job], world: World) -> None:
        """Run a stage's jobs, and note which did not end."""
        echo(f"{self.out}: {len(jobs)} runs to go in this stage", flush=True)
        self.stopped, endings = run_jobs(jobs, world, self.directory, self.cluster)
        for job in jobs:
            if not is_ended(Path(job.path)):
                self.failed.append(job.name)
                ending = endings.get(job.name)
                echo(f"{job.path}: {ending.state if ending else 'not started'}")


def run_study(study: Study, out: Path, launcher: list[str], added: list[str]) -> int:
    """Run what has not ended yet, stage by stage, and say which runs did not end.

    All configs are checked before the first run starts. A run that ended starts no process, another
    one resumes.

    Args:
        launcher: the overrides hydra/launcher=... and hydra.launcher.*.
        added: plugins and --config-dir, for the runs' own command lines.

    Returns:
        0 if every run has ended and every arm has a learning rate, 128 + n if signal n stopped the
        study, else 1.

    Raises:
        ConfigError: a study that could not run; nothing has been started or changed.
    """
    world = meet()

    def begin() -> Course:
        cluster = ClusterLauncher.of(launcher, world.size, f"run.sweep={out.name}")
        check_runs(study, out, cluster.world_size if cluster else world.size)
        directory = SweepDirectory(out)
        directory.hold()
        return Course(study, out, directory, cluster, added)

    _, course = world.broadcast_and_keep("study", lambda: (None, begin()))

    def stage() -> list[dict[str, Any]]:
        assert course
        return course.stage()

    for number in count():
        jobs = [Job(**job) for job in world.broadcast_from_rank0(f"stage/{number}", stage)]
        if not jobs:
            break
        if course:
            course.run(jobs, world)
        else:
            run_jobs(jobs, world, SweepDirectory(out), None)
    if course is None:
        return 0
    if course.failed or course.stopped:
        echo(f"{len(course.failed)} runs did not end; the same command goes on with them")
        return 128 + course.stopped if course.stopped else 1
    diverged = [choice for choice in choose_all(study, out) if choice.lr is None]
    for choice in diverged:
        rates = ", ".join(f"{lr:g}" for lr in choice.losses)
        echo(f"arm {choice.arm} diverged at every learning rate ({rates}): it has no deciding run")
    which = "all other runs" if diverged else "all runs"
    echo(f"{which} of {out} have ended: diffllm study verdict {study.path} out={out}")
    return 1 if diverged else 0


def next_runs(study: Study, out: Path) -> list[Planned]:
    """The runs of the stage that comes next and have not ended: those that learning rates are
    chosen by, all arms together, then those that decide."""
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


def check_runs(study: Study, out: Path, world_size: int) -> None:
    """Raise ConfigError for an arm that cannot run, and a directory that holds other runs."""
    for planned in first_runs(study):
        cfg = config_of(planned)
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
        if problem := strayed(path, load_run_config(path), config_of(planned)):
            raise ConfigError(
                f"{path} is a run with another config ({problem}); choose another out="
            )


def first_runs(study: Study) -> list[Planned]:
    """A run of every arm that decides, with a rate of the grid where rates are chosen."""
    lr = study.lr.grid[0] if study.lr else None
    return [deciding_runs(study, arm, study.seeds[0], lr)[0] for arm in study.arms]
