"""The actions that are due at a step, from the intervals of the config alone."""

from typing import NamedTuple

from diffllm.config import TrainConfig


class Due(NamedTuple):
    """The actions that are due at one step."""

    statistics: bool = False
    """Take in-block statistics."""
    probes: bool = False
    """Probe explicit maps."""
    update: bool = False
    """Take the norm of the parameters' change; copies this rank's parameters."""
    log: bool = False
    """Write and show training, performance and spikes."""
    check: bool = False
    """Compare the ranks' tensors."""
    sample: bool = False
    """Compute the loss of the held-out sample."""
    tasks: bool = False
    """Evaluate the tasks of eval.suites."""
    save: bool = False
    """Save a checkpoint."""
    profile: bool = False
    """Trace the step, or warm the profiler up for the next one."""
    last: bool = False
    """Whether this is the last step of the run."""

    @property
    def diagnose(self) -> bool:
        """Whether blocks measure anything."""
        return self.statistics or self.probes


def every(interval: int, step: int) -> bool:
    """Return whether an action with this interval is due at `step`, from 1; 0 means never."""
    return interval > 0 and step % interval == 0


def due(cfg: TrainConfig, step: int) -> Due:
    """Return the actions that are due at `step`, counted from 1.

    The first step is logged; the last one is logged, evaluated and saved.
    """
    last = step == cfg.steps
    interval = cfg.checkpoint.interval
    first, final = cfg.profile.steps or (0, -1)
    log = every(cfg.log_interval, step) or step == 1 or last
    return Due(
        statistics=every(cfg.diagnostics.interval, step),
        probes=every(cfg.diagnostics.probe_interval, step),
        update=log,
        log=log,
        check=every(cfg.distributed.check_interval, step),
        sample=every(cfg.eval.interval, step) or last,
        tasks=bool(cfg.eval.suites) and (every(cfg.eval.suites_interval, step) or last),
        save=(isinstance(interval, int) and every(interval, step)) or last,
        profile=first - 1 <= step <= final,
        last=last,
    )
