"""Per-process state of a run: its creation and its end."""

import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from diffllm.config import TrainConfig
from diffllm.core.errors import AgreedError, ConfigError, UserError
from diffllm.distributed.stop import StoppedEarly, StopRequest
from diffllm.distributed.watch import Watch
from diffllm.distributed.world import World
from diffllm.metrics.display import Display, RunLog
from diffllm.training.directory import RunDirectory
from diffllm.training.provenance import command


class Process(NamedTuple):
    """Per-process state that lasts for the whole run."""

    world: World
    stop: StopRequest
    watch: Watch
    display: Display
    log: RunLog


def enter(cfg: TrainConfig, world: World, stop: StopRequest) -> Process:
    """Begin to watch the other ranks, and to log."""
    watch, log = Watch(world, cfg.distributed.timeout, stop), RunLog()
    display = Display(cfg.steps, enabled=world.rank == 0, log=log)
    if not in_sweep():  # a sweep logs the stderr of its jobs
        log.copy_stderr(errors_only=world.rank > 0)
        log.write(f"{started()}\n" * (world.rank == 0))
    return Process(world, stop, watch, display, log)


def leave(here: Process, error: BaseException | None, directory: RunDirectory | None) -> None:
    """End this process's part in a run, with or without an error.

    Name a missing rank first: its stack traces go into the run directory. After a UserError, remove
    the run directory if this process created it and it contains no run.
    """
    try:
        if error is None:
            here.watch.close()
        else:
            here.watch.blame(error)
    finally:
        here.display.stop()
        if error is not None and not in_sweep():
            here.log.write(last_words(error, here.world.rank))
        here.log.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if directory and isinstance(error, UserError):
            directory.withdraw()
        here.watch.close()


def in_sweep() -> bool:
    """Return whether a sweep has started this process."""
    return "DIFFLLM_SWEEP_JOB" in os.environ


def log_file(path: Path) -> Path:
    """Return the log file of the run at `path`; in a sweep, it lies next to the directory."""
    return path.with_name(f"{path.name}.log") if in_sweep() else path / "run.log"


def started() -> str:
    """Return start time, host and command line as text."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{when} on {socket.gethostname()}: {command(sys.orig_argv)}"


def last_words(error: BaseException, rank: int) -> str:
    """Return the last lines of the log for an error; for an error of all ranks, on rank 0 only."""
    if isinstance(error, StoppedEarly):
        text = f"stopped by {error.args[0].name} before the first step\n"
    elif isinstance(error, UserError):
        text = f"error: {error}\n" if rank == 0 else f"error: rank {rank}: {error}\n"
    else:
        text = "".join(traceback.format_exception(error))
    return "" if rank > 0 and isinstance(error, (AgreedError, ConfigError, StoppedEarly)) else text
