"""The task of a cluster's job: one rank of one run."""

import contextlib
import os
import signal
from typing import Any

from diffllm.compare.sweep.job import Ending, Job, JobProcess


class ClusterTask:
    """The callable that submitit calls in every task of a job, with the job as its argument."""

    process: JobProcess | None = None

    def __call__(self, job: Job) -> Ending:
        """Run the job as the rank that this task is."""
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        world = JobEnvironment()
        if world.num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        self.process = process = JobProcess(job, world.global_rank)
        signal.signal(signal.SIGINT, lambda number, _: process.stop(number))
        return process.wait()

    def checkpoint(self, job: Job) -> Any:
        """Let a preempted run, or one out of time, save; submitit queues the job again."""
        from submitit.helpers import DelayedSubmission

        if self.process:
            self.process.stop(signal.SIGTERM)
            with contextlib.suppress(ChildProcessError):  # WNOWAIT: reaping it is __call__'s
                os.waitid(os.P_PID, self.process.child.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(ClusterTask(), job)
