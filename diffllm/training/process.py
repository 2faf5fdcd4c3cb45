"""Start and cleanup of a process of a run."""

import socket
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from diffllm.config import TrainConfig
from diffllm.core.errors import AgreedError, ConfigError, UserError
from diffllm.core.run_files import RunFolder
from diffllm.core.secrets import command_text
from diffllm.distributed.launcher import in_sweep
from diffllm.distributed.stop import StoppedEarly, StopRequest
from diffllm.distributed.watch import Watch
from diffllm.distributed.world import World
from diffllm.metrics.display import Display, RunLog
from diffllm.training.run_directory import RunDirectory
from diffllm.training.stalls import record_stall
from diffllm.training.state import LoopState


class Process(NamedTuple):
    """Objects of this process in a run: ranks, stop signals, hang detection, display and log."""

    world: World
    stop: StopRequest
    watch: Watch
    display: Display
    log: RunLog


def enter(cfg: TrainConfig, world: World, stop: StopRequest) -> Process:
    log = RunLog()
    display = Display(cfg.steps, enabled=world.rank == 0, log=log)
    watch = Watch(world, cfg.distributed.timeout, stop, on_end=display.stop)
    if not in_sweep():  # A sweep logs the stderr of its jobs itself.
        log.copy_stderr(errors_only=world.rank > 0)
        if world.rank == 0:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"{now} on {socket.gethostname()}: {command_text(sys.orig_argv)}\n")
    return Process(world, stop, watch, display, log)


def meet(
    cfg: TrainConfig, process: Process, device: torch.device, path: Path, state: LoopState
) -> None:
    """Connect the ranks; from now on, hangs are recorded in the run directory `path`."""
    torch.manual_seed(cfg.seed)
    process.watch.reached("the connection of the ranks")
    process.world.init_process_group(device, cfg.distributed)
    process.watch.record_in(path / RunFolder.TRACES, partial(record_stall, path, state))


def leave(process: Process, error: BaseException | None, directory: RunDirectory | None) -> None:
    """Clean up this process at the end of a run; `error` is None if the run did not fail.

    Log `error`, and report it to the other ranks. After a UserError, call `directory.withdraw`.
    """
    try:
        if error is None:
            process.watch.close()
        else:
            process.watch.blame(error)
    finally:
        process.display.stop()
        if error is not None and not in_sweep():
            process.log.write(log_text(process, error))
        process.log.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if directory and isinstance(error, UserError):
            directory.withdraw()
        process.watch.close()


def log_text(process: Process, error: BaseException) -> str:
    """Return the text about `error` for the log; "" if only rank 0 logs the error."""
    rank = process.world.rank
    # All ranks have these errors.
    if rank > 0 and isinstance(error, (AgreedError, ConfigError, StoppedEarly)):
        return ""
    if isinstance(error, StoppedEarly):
        return f"stopped by {error.args[0].name} before the first step\n"
    if isinstance(error, KeyboardInterrupt):
        return f"stopped immediately by SIGINT at {process.watch.place}\n"
    if isinstance(error, UserError):
        return f"error: {error}\n" if rank == 0 else f"error: rank {rank}: {error}\n"
    return "".join(traceback.format_exception(error))
