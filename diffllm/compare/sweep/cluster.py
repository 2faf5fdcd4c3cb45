"""Run the jobs of a sweep with submitit: as SLURM jobs, or in parallel on this machine.

The options hydra/launcher=submitit_slurm and hydra.launcher.* have the same meaning as in Hydra.
Hydra's own launcher is not used: it restarts finished runs, and one killed job ends the sweep.
"""

import importlib.util
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffllm.compare.sweep.job import ClusterTask, Ending, Job, Stops
from diffllm.compare.sweep.sweep_directory import SweepDirectory
from diffllm.config.compose import hydra
from diffllm.config.overrides import one_line
from diffllm.config.words import for_hydra
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path
from diffllm.core.printing import echo
from diffllm.distributed.launcher import ranks_on_first_node

FOLDER_KEY = "hydra.launcher.submitit_folder"
LAUNCHERS = {"submitit_slurm": "slurm", "submitit_local": "local"}


@dataclass
class ClusterLauncher:
    """Submits the jobs of a sweep with submitit, to SLURM or as processes on this machine."""

    kind: str
    """"slurm" or "local"."""
    words: list[str]
    """Overrides of hydra/launcher and hydra.launcher.*."""
    settings: dict[str, Any]
    """Values of hydra.launcher.* after these overrides."""

    @classmethod
    def of(cls, words: list[str], ranks: int, sweep: str) -> "ClusterLauncher | None":
        """Return the launcher that the override hydra/launcher selects.

        Return None for hydra/launcher=basic, the default. Raises ConfigError for invalid settings.

        Args:
            words: overrides of hydra/launcher and hydra.launcher.*.
            ranks: current world size; a submitit launcher requires 1.
            sweep: the override run.sweep=<name>.
        """
        name = "basic"
        has_settings = False
        for word in words:
            key, _, value = word.partition("=")
            if key == "hydra/launcher":
                name = value
            else:
                has_settings = True
        if name not in ("basic", *LAUNCHERS):
            raise ConfigError(f"hydra/launcher={name} is not one of basic, {', '.join(LAUNCHERS)}")
        if name == "basic":
            if has_settings:
                raise ConfigError(
                    f"{words[-1]} needs a cluster launcher; add hydra/launcher=submitit_slurm or "
                    "hydra/launcher=submitit_local"
                )
            return None
        if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
            raise ConfigError(
                f"hydra/launcher={name} needs a package; run "
                "pip install -c constraints.txt -e '.[slurm]'"
            )
        if ranks > 1:
            raise ConfigError(f"hydra/launcher={name} starts its own ranks; do not use torchrun")
        with hydra():
            try:
                # The launcher names the jobs in SLURM's queue by hydra.job.name.
                overrides = [for_hydra(word) for word in [*words, sweep]]
                overrides.append("hydra.job.name=${run.sweep}")
                cfg = compose("train", overrides=overrides, return_hydra_config=True)
                settings: Any = OmegaConf.to_container(cfg.hydra.launcher, resolve=True)
            except (HydraException, OmegaConfBaseException) as error:
                raise ConfigError(f"{' '.join(words)}: {one_line(error)}") from error
        # Hydra's class of its launcher; all other settings are arguments for submitit.
        del settings["_target_"]
        user_path(settings["submitit_folder"], FOLDER_KEY)
        return cls(LAUNCHERS[name], words, settings)

    @property
    def world_size(self) -> int:
        return self.settings["nodes"] * self.settings["tasks_per_node"]

    def run(self, jobs: list[Job], directory: SweepDirectory) -> tuple[int, dict[str, Ending]]:
        """Submit the jobs that are not yet in SLURM's queue, and wait until all jobs have ended.

        SIGINT or SIGTERM stops the jobs on this machine; SLURM jobs remain in the queue.

        Returns:
            The number of the received signal (0 for none), and {job name: how the job ended}.
        """
        is_slurm = self.kind == "slurm"
        message = "the jobs stay in the queue; the same command waits for them"
        with Stops(message if is_slurm else "stopping") as stops:
            handles = self.submit(jobs, directory)
            endings: dict[str, Ending] = {}
            while len(endings) < len(jobs) and not (stops.received and is_slurm):
                time.sleep(0.2)
                for job in jobs:
                    if job.name in endings:
                        continue
                    handle = handles[job.name]
                    if stops.received and not is_slurm:
                        handle.cancel()
                    if handle.done():
                        ending = self.ending(job, handle)
                        endings[job.name] = ending
                        echo(f"run {job.number} of {job.total}: {job.name} {ending.state}")
        for name in handles.keys() - endings.keys():
            endings[name] = Ending("stays", f"in the queue as {handles[name].job_id}")
        return stops.received, endings

    def submit(self, jobs: list[Job], directory: SweepDirectory) -> dict[str, Any]:
        """Submit the jobs that are not in SLURM's queue; return the handles of all jobs, by name.

        The ids of the new SLURM jobs are stored in sweep.json.
        """
        import submitit

        folder = str(Path(self.settings["submitit_folder"]).absolute())
        job_ids = directory.record["jobs"]
        handles: dict[str, Any] = {}
        new_jobs = []
        for job in jobs:
            job_id = job_ids.get(job.name)
            if job_id and self.kind == "slurm" and in_queue(job_id):
                tasks = range(self.world_size)
                handles[job.name] = submitit.SlurmJob(folder, job_id, tasks=tasks)
            else:
                new_jobs.append(job)
        if new_jobs:
            executor = self.executor(folder)
            try:
                # A job array, so that hydra.launcher.array_parallelism limits the concurrent jobs.
                new_handles = executor.map_array(ClusterTask(), new_jobs)
            except submitit.core.utils.FailedJobError as error:
                raise ConfigError(f"{' '.join(self.words)}: {one_line(error)}") from error
            for job, handle in zip(new_jobs, new_handles, strict=True):
                handles[job.name] = handle
                if self.kind == "slurm":
                    job_ids[job.name] = handle.job_id
            if self.kind == "slurm":
                directory.write()
        for job in jobs:
            action = "submitted as" if job in new_jobs else "already queued as"
            echo(f"run {job.number} of {job.total}: {job.name} {action} {handles[job.name].job_id}")
        return handles

    def executor(self, folder: str) -> Any:
        import submitit
        from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
        from submitit.core.utils import JobPaths

        common_keys = set(OmegaConf.structured(BaseQueueConf))
        settings = {}
        for key, value in self.settings.items():
            settings[key if key in common_keys else f"slurm_{key}"] = value
        del settings["submitit_folder"]
        most_timeouts = settings.pop("slurm_max_num_timeout", None)
        # Without an override, keep submitit's default: the plugin's 0 is for code that cannot
        # resume.
        retries = {}
        if any(word.startswith("hydra.launcher.max_num_timeout=") for word in self.words):
            retries["slurm_max_num_timeout"] = most_timeouts
        try:
            executor = submitit.AutoExecutor(folder, cluster=self.kind, **retries)
            executor.update_parameters(**settings)
            JobPaths.get_first_id_independent_folder(folder).mkdir(parents=True, exist_ok=True)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"hydra/launcher=submitit_{self.kind}: {one_line(error)}") from error
        except OSError as error:
            raise ConfigError(
                f"{FOLDER_KEY}={folder} cannot be created: {error.strerror}; "
                "choose another directory"
            ) from error
        return executor

    def ending(self, job: Job, handle: Any) -> Ending:
        import submitit

        try:
            return first_failed(handle.results())
        except submitit.core.utils.UncompletedJobError as error:
            # submitit has no result of the job, but the run itself may have finished.
            if job.has_summary:
                return Ending("finished")
            return Ending("failed", f"{failure_reason(error)}, {job.progress()}")


def ranks_of_runs(cluster: ClusterLauncher | None, world_size: int) -> tuple[int, int]:
    """Return the number of ranks of each run, and how many of these ranks are on this machine.

    The second number is 0 if SLURM chooses the machines. `world_size` is that of this launch.
    """
    if cluster is None:
        return world_size, ranks_on_first_node()
    ranks_here = cluster.world_size if cluster.kind == "local" else 0
    return cluster.world_size, ranks_here


def first_failed(endings: list[Ending]) -> Ending:
    """Choose the result of a job from the results of its ranks.

    Return the earliest failure with a message, or else the earliest failure without a message. If
    no rank failed, return the result of rank 0.
    """
    failures = [ending for ending in endings if ending.state == "failed"]
    if not failures:
        return endings[0]
    # A rank also fails when it has lost another rank, so the earliest failure is the cause.
    return min(failures, key=lambda ending: (ending.silent, ending.at))


def failure_reason(error: Exception) -> str:
    """Return the reason in an error message of submitit."""
    state = re.search(r"\(state: (.*?)\)", str(error))
    if state:
        return f"ended by the scheduler ({state[1]})"
    text = "no result"
    for line in str(error).splitlines():
        # The last line of a traceback names the error.
        if "Error: " in line:
            text = line.rpartition("Error: ")[2].strip(" .")
    # Name the setting that allows more timeouts.
    return text.replace("too many times", "more often than hydra.launcher.max_num_timeout")


def in_queue(job_id: str) -> bool:
    """Return whether a job is in SLURM's queue.

    If squeue fails, the answer is unknown and ConfigError is raised. A wrong answer False could
    make the caller start a queued run a second time.
    """
    words = ["squeue", "--noheader", "--jobs", job_id, "--format", "%i"]
    try:
        answer = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"squeue cannot be run for job {job_id}: {error.strerror}; "
            "start the sweep on a machine that has the SLURM commands"
        ) from error
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise ConfigError(
            f"squeue failed for job {job_id}: {' '.join(answer.stderr.split())}; "
            "try again when squeue works"
        )
    return bool(answer.stdout.strip())
