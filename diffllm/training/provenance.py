"""The origin of a run for run.json: its command line, the code's commit, the environment."""

import importlib.metadata
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from diffllm.config.overrides import SECRET
from diffllm.core import VERSION
from diffllm.distributed.consistency import code_version

PACKAGES = (
    "torch", "numpy", "hydra-core", "omegaconf", "torchdata", "datasets", "sentencepiece", "wandb",
    "flash-attn", "flash-attn-4",
)  # fmt: skip
VARIABLES = re.compile(
    r"(NCCL|TORCH|TORCHINDUCTOR|TRITON|PYTORCH|CUDA|CUBLAS|GLOO|OMP|MKL|DIFFLLM)_\w+"
    r"|SLURM_(JOB_ID|JOB_NAME|JOB_NODELIST|NNODES|NTASKS)|(LOCAL_)?WORLD_SIZE"
    r"|HF_HOME|HF_\w*OFFLINE|WANDB_MODE"
)
"""Names of environment variables that change what a run does or how fast; none holds a secret."""
SECRET_OPTION = re.compile(rf"-*([\w.]+[-_.])?{SECRET}", re.I)


def provenance() -> dict[str, Any]:
    """Collect the command, the code's version and commit, and the environment, as JSON values."""
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
            "variables": {
                name: value for name, value in sorted(os.environ.items()) if is_public(name)
            },
        },
    }


def is_public(name: str) -> bool:
    """Whether an environment variable matters to a run and its name is not that of a secret."""
    return bool(VARIABLES.fullmatch(name)) and not SECRET_OPTION.fullmatch(name)


def command(argv: list[str]) -> str:
    """Join a command line for a shell; hide the values of options that look like secrets."""
    shown = []
    hide_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        secret = bool(SECRET_OPTION.fullmatch(name))
        hidden = f"{name}=..." if equals else word
        shown.append("..." if hide_next else hidden if secret else word)
        hide_next = secret and not equals and word.startswith("-")
    return shlex.join(shown)


def versions() -> dict[str, str]:
    """Return the versions of those `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return commit and dirty flag of a tracked directory; None without git or tracked files."""
    try:
        if not git(directory, "ls-files", "--", "."):  # a wheel in a repository's ignored .venv
            return None
        commit = git(directory, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(git(directory, "status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def git(directory: Path, *words: str) -> str:
    """Return what a git command prints; raises CalledProcessError if it fails."""
    return subprocess.run(
        ["git", "-C", directory, *words], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
