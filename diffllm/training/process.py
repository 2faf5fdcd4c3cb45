"""Start and cleanup of a process of a run; command, code and environment for run.json."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from diffllm.config import TrainConfig
from diffllm.config.overrides import SECRET
from diffllm.core import VERSION
from diffllm.core.errors import AgreedError, ConfigError, UserError
from diffllm.core.run_files import RunFile, sweep_log
from diffllm.distributed.consistency import code_version
from diffllm.distributed.stop import StoppedEarly, StopRequest
from diffllm.distributed.watch import Watch
from diffllm.distributed.world import World
from diffllm.metrics.display import Display, RunLog
from diffllm.training.directory import RunDirectory


class Process(NamedTuple):
    """Objects of this process in a run: ranks, stop signals, hang detection, display and log."""

    world: World
    stop: StopRequest
    watch: Watch
    display: Display
    log: RunLog


def enter(cfg: TrainConfig, world: World, stop: StopRequest) -> Process:
    watch = Watch(world, cfg.distributed.timeout, stop)
    log = RunLog()
    display = Display(cfg.steps, enabled=world.rank == 0, log=log)
    if not in_sweep():  # A sweep logs the stderr of its jobs itself.
        log.copy_stderr(errors_only=world.rank > 0)
        if world.rank == 0:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"{now} on {socket.gethostname()}: {command(sys.orig_argv)}\n")
    return Process(world, stop, watch, display, log)


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
        rank = process.world.rank
        # All ranks have these errors; only rank 0 logs them.
        is_on_all_ranks = isinstance(error, (AgreedError, ConfigError, StoppedEarly))
        if error is not None and not in_sweep() and not (rank and is_on_all_ranks):
            if isinstance(error, StoppedEarly):
                text = f"stopped by {error.args[0].name} before the first step\n"
            elif isinstance(error, KeyboardInterrupt):
                text = f"stopped immediately by SIGINT at {process.watch.place}\n"
            elif isinstance(error, UserError):
                text = f"error: {error}\n" if rank == 0 else f"error: rank {rank}: {error}\n"
            else:
                text = "".join(traceback.format_exception(error))
            process.log.write(text)
        process.log.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if directory and isinstance(error, UserError):
            directory.withdraw()
        process.watch.close()


def in_sweep() -> bool:
    return "DIFFLLM_SWEEP_JOB" in os.environ


def log_file(path: Path) -> Path:
    return sweep_log(path) if in_sweep() else path / RunFile.LOG


PACKAGES = (
    "torch", "numpy", "hydra-core", "omegaconf", "torchdata", "datasets", "sentencepiece", "wandb",
    "flash-attn", "flash-attn-4",
)  # fmt: skip
VARIABLES = re.compile(
    r"(NCCL|TORCH|TORCHINDUCTOR|TRITON|PYTORCH|CUDA|CUBLAS|GLOO|OMP|GOMP|KMP|MKL|DIFFLLM)_\w+"
    r"|SLURM_(JOB_ID|JOB_NAME|JOB_NODELIST|NNODES|NTASKS)|(LOCAL_)?WORLD_SIZE"
    r"|HF_HOME|HF_\w*OFFLINE|WANDB_(MODE|PROJECT|ENTITY|RUN_GROUP|TAGS|NAME|JOB_TYPE|RUN_ID|DIR)"
)
"""Names of environment variables that affect a run and contain no secrets."""
SECRET_OPTION = re.compile(rf"-*([\w.]+[-_.])?{SECRET}", re.I)


def provenance() -> dict[str, Any]:
    """Return the command line, code version, Git commit and environment as JSON values."""
    variables = {}
    for name, value in sorted(os.environ.items()):
        if VARIABLES.fullmatch(name) and not SECRET_OPTION.fullmatch(name):
            variables[name] = value
    return {
        "command": command(sys.orig_argv),
        "diffllm": {"version": VERSION, "hash": code_version()["diffllm"]},
        "git": git_state(Path(__file__).parents[1]) or git_state(Path.cwd()),
        "environment": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "packages": versions(),
            "variables": variables,
        },
    }


def command(argv: list[str]) -> str:
    """Format command line arguments for a shell; replace values of secret options by "..."."""
    printed_words = []
    is_secret_value = False
    for word in argv:
        name, equals, _ = word.partition("=")
        is_secret_option = bool(SECRET_OPTION.fullmatch(name))
        if is_secret_value:
            printed_words.append("...")
        elif is_secret_option and equals:
            printed_words.append(f"{name}=...")
        else:
            printed_words.append(word)
        # The value of an option without "=", such as `--token VALUE`, is the next word.
        is_secret_value = is_secret_option and not equals and word.startswith("-")
    return shlex.join(printed_words)


def versions() -> dict[str, str]:
    version_by_package = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version_by_package[name] = importlib.metadata.version(name)
    return version_by_package


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return the Git state: {"commit": hash, "dirty": whether tracked files have changed}.

    Return None if Git is missing, or if Git tracks no file of the directory.
    """
    try:
        # A wheel may be installed in an ignored .venv inside an unrelated repository.
        if not git(directory, "ls-files", "--", "."):
            return None
        commit = git(directory, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(git(directory, "status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def git(directory: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", directory, *words],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
        timeout=10,
    ).stdout.strip()
