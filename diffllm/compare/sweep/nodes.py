"""One preparation on several nodes, as a job array of submitit."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffllm.compare.sweep.cluster import ClusterLauncher, why
from diffllm.config import load_config
from diffllm.config.overrides import one_line
from diffllm.core.errors import ConfigError, DataError
from diffllm.core.printing import echo
from diffllm.data import prepare
from diffllm.data.preparation.prepare import LeftToOthers


@dataclass(frozen=True)
class NodeTask:
    """The callable that submitit calls on each node, with the node's number as its argument."""

    words: list[str]
    directory: str
    """Where relative paths begin."""

    def __call__(self, node: int) -> None:
        """Prepare the parts of a node."""
        os.chdir(self.directory)
        cfg = load_config([*self.words, f"prepare.node_rank={node}"])
        with suppress(LeftToOthers):
            prepare(cfg.data, cfg.prepare)

    def checkpoint(self, node: int) -> Any:
        """Queue the node again when it is preempted or out of time; what is done stays."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, node)


def prepare_on_nodes(words: list[str], launcher: list[str], nodes: int) -> None:
    """Submit `diffllm prepare` once for each node, and wait for all.

    Raises ConfigError for a cluster that is not there, DataError for nodes that failed.

    Args:
        words: the overrides of the preparation.
        launcher: the overrides hydra/launcher=... and hydra.launcher.*.
    """
    import submitit

    cluster = ClusterLauncher.of(launcher, 1, "run.sweep=prepare")
    if cluster is None:
        raise ConfigError("hydra/launcher=basic submits nothing: leave it out")
    if cluster.world_size > 1:
        raise ConfigError(
            "hydra.launcher.nodes and tasks_per_node have to be 1: prepare.num_nodes says how many "
            "jobs, prepare.processes how many processes each"
        )
    executor = cluster.executor(str(Path(cluster.settings["submitit_folder"]).absolute()))
    try:
        jobs = executor.map_array(NodeTask(words, str(Path.cwd())), range(nodes))
    except submitit.core.utils.FailedJobError as error:
        raise ConfigError(f"{' '.join(launcher)}: {one_line(error)}") from error
    ids = ", ".join(job.job_id for job in jobs)
    echo(f"submitted {nodes} job{'s' * (nodes > 1)}, {ids}; waiting for all")
    failed: list[str] = []
    for node, job in enumerate(jobs):
        try:
            job.result()
        except submitit.core.utils.UncompletedJobError as error:
            failed.append(f"node {node}: {why(error)}")
        except Exception as error:
            failed.append(f"node {node}: {error}")
    if failed:
        raise DataError(
            f"{len(failed)} of {nodes} nodes did not finish ({'; '.join(failed[:3])}); the same "
            "command goes on with the parts that are left"
        )
