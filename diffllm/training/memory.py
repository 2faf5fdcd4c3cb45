"""Memory that the training state of a run takes, and the memory that this machine has."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diffllm.config import TrainConfig
from diffllm.core.errors import ConfigError
from diffllm.core.machine import ROOT, control_groups
from diffllm.distributed.fsdp import stored_values
from diffllm.model import without_storage

GIB = 2**30
STEP_BYTES = 4
"""Size of AdamW's step counter, one float32 per parameter."""


class TrainingState(NamedTuple):
    """Bytes of one rank that every optimizer update needs at the same time."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


def training_state(model: Any, sizes: tuple[int, int, int], rank: int) -> TrainingState:
    """Compute the training state of `rank` from the shapes of the parameters.

    Every trainable parameter is assumed to get a gradient. For the arguments, see `stored_values`.
    """
    parameters = gradients = optimizer = 0
    for param, values in stored_values(model, sizes, rank):
        size = values * param.element_size()
        parameters += size
        if param.requires_grad:
            gradients += size
        optimizer += 2 * size + STEP_BYTES  # AdamW: exp_avg, exp_avg_sq and the step counter
    return TrainingState(parameters, gradients, optimizer)


def check_memory(cfg: TrainConfig, world_size: int, ranks_here: int) -> None:
    """Raise ConfigError if the run cannot fit into the memory of this machine.

    The training state alone decides. A run needs more memory, so that a run that passes this check
    can still fail. Call this on rank 0. Do nothing if `cfg.force` is true.

    Args:
        ranks_here: number of ranks on this machine, from rank 0; 0 if other machines run them.
    """
    if cfg.force or not ranks_here:
        return
    try:
        model = without_storage(cfg.model)
    except Exception:  # The run itself fails with a message; other runs of a sweep can start.
        return
    sizes = cfg.parallel.sizes(world_size)
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        needed = training_state(model, sizes, 0).total
        available = gpu.total_memory
        place = f"the GPU {gpu.name}"
    else:
        # The ranks of this machine share its memory.
        needed = 0
        for rank in range(ranks_here):
            needed += training_state(model, sizes, rank).total
        available = machine_memory()
        place = "this machine or container"
    if needed > available:
        choices = cfg.resolved.choices
        raise ConfigError(
            f"model={choices['model']} attention={choices['attention']} does not fit into memory: "
            f"parameters, gradients and optimizer state need at least {needed / GIB:,.2f} GiB, "
            f"but {place} has {available / GIB:,.2f} GiB; choose a smaller model, plan a cluster "
            "(diffllm plan with the same overrides), or set force=true to start anyway"
        )


def machine_memory(root: Path = ROOT) -> int:
    """Return the physical memory of this machine in bytes, or a lower limit of a control group.

    Swap space does not count.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for directory in control_groups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):  # cgroups of version 2, of version 1
            memory = min(memory, limit_in(directory / name, memory))
    return memory


def limit_in(file: Path, default: int) -> int:
    """Return the number in a limit file of a control group, or `default` without a limit."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return default
    return int(text) if text.isdecimal() else default
