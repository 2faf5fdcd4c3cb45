"""The jobs of a sweep one after the other, on this machine or with the other ranks of a launch."""

import signal
from types import FrameType

from diffllm.distributed.world import World
from diffllm.sweep.job import Ending, Job, JobProcess

STOPS = (signal.SIGINT, signal.SIGTERM)


class Stops:
    """A context in which SIGINT and SIGTERM are noted, and passed on to the job that runs."""

    def __enter__(self) -> "Stops":
        self.received = 0
        self.process: JobProcess | None = None
        self.previous = {number: signal.signal(number, self._on_signal) for number in STOPS}
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self.process:
            self.process.stop(number)

    def run(self, job: Job, rank: int) -> Ending:
        """Run a job to its end; a signal that came while it started counts."""
        process = JobProcess(job, rank)
        self.process = process
        if self.received and not process.signalled:
            process.stop(self.received)
        try:
            return process.wait()
        finally:
            self.process = None

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def run_here(jobs: list[Job], world: World) -> tuple[int, dict[str, Ending]]:
    """Run jobs in order.

    Returns:
        The signal that stopped the sweep or 0, and how each job ended by name.
    """
    endings: dict[str, Ending] = {}
    with Stops() as stops:
        for job in jobs:
            if world.rank == 0:
                print(f"\nrun {job.number} of {job.total}: {job.name}", flush=True)
            endings[job.name] = ending = stops.run(job, world.rank)
            if world.rank == 0 and ending.state == "failed":
                print(f"{job.path} failed, {ending.reason}", flush=True)
            if stops.received:
                break
    return stops.received, endings
