"""What each task of a cluster's job does: one rank of one run."""

import contextlib
import os
import signal
from types import FrameType
from typing import Any

from diffllm.sweep.job import Ending, Job, JobProcess


class ClusterTask:
    """Called by submitit in every task of a job, with the job as its argument."""

    process: JobProcess | None = None

    def __call__(self, job: Job) -> Ending:
        """Run the job as the rank that this task is."""
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        world = JobEnvironment()
        if world.num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        signal.signal(signal.SIGINT, self._on_interrupt)
        self.process = JobProcess(job, world.global_rank)
        return self.process.wait()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.process:
            self.process.stop(number)

    def checkpoint(self, job: Job) -> Any:
        """Preempted, or out of time: let the run save; submitit puts the job back in the queue."""
        from submitit.helpers import DelayedSubmission

        if self.process:
            self.process.stop(signal.SIGTERM)
            with contextlib.suppress(ChildProcessError):  # WNOWAIT: reaping it is __call__'s
                os.waitid(os.P_PID, self.process.child.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(ClusterTask(), job)
