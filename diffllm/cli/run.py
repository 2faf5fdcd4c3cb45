"""One run with its tasks and its report: for `diffllm train` and `diffllm.train`."""

from pathlib import Path

from diffllm.compare.report import write_report
from diffllm.config import TrainConfig
from diffllm.evaluation.suite import tasks_of
from diffllm.training.run import Outcome, run


def run_and_report(cfg: TrainConfig) -> Outcome:
    """Run a config in every process of a launch; raises UserError as `run` does."""
    return run(cfg, tasks_of(cfg), report_on if cfg.run.report else None)


def report_on(path: Path) -> str:
    """Write a run's report; return its path, or the reason why it is missing. Never raises."""
    try:
        return str(write_report([path])[0])
    except Exception as error:
        return f"not written: {error!r}"
