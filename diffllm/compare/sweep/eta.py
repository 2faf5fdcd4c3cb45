"""Remaining time of the runs of a sweep that follow each other on this machine."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diffllm.compare.sweep.job import Job
from diffllm.config import TrainConfig
from diffllm.config.matching import totals
from diffllm.metrics.display import duration
from diffllm.metrics.records import finite, read_ending


def flops_of_step(cfg: TrainConfig) -> float:
    """Return the training FLOPs of one optimizer step; 0 if the model cannot be built."""
    try:
        flops_per_token = totals(cfg.model, cfg.visible_keys)["flops"]
    except Exception:  # The run itself fails with a message; the other runs can start.
        return 0.0
    return cfg.global_batch_size * cfg.seq_len * flops_per_token


@dataclass
class Pace:
    """Seconds and training FLOPs of finished runs."""

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
