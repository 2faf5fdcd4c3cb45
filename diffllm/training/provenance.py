"""Command, code and environment of a run, for run.json."""

import contextlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from diffllm.core import VERSION
from diffllm.core.git import git_state
from diffllm.core.secrets import SECRET_OPTION, command_text
from diffllm.distributed.consistency import code_version

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


def provenance() -> dict[str, Any]:
    """Return the command line, code version, Git commit and environment as JSON values."""
    variables = {}
    for name, value in sorted(os.environ.items()):
        if VARIABLES.fullmatch(name) and not SECRET_OPTION.fullmatch(name):
            variables[name] = value
    return {
        "command": command_text(sys.orig_argv),
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


def versions() -> dict[str, str]:
    version_by_package = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version_by_package[name] = importlib.metadata.version(name)
    return version_by_package
