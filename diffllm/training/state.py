"""The loop state of a run; saving and restoring it with the parameters."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.checkpoint.reader import load_tensors
from diffllm.checkpoint.writer import Checkpointer
from diffllm.core.errors import CheckpointError
from diffllm.distributed.launcher import MKL_MODE, OLDER_MODE
from diffllm.metrics.spikes import SpikeMonitor
from diffllm.training.build import Training

OF_OLDER_CHECKPOINTS = {"seconds": 0.0, "compiled": False, "mkl_mode": OLDER_MODE}
"""Values of fields that the state in older checkpoints lacks."""


@dataclass
class LoopState:
    """The state of a run that is not a tensor; JSON in checkpoints."""

    step: int = 0
    data: dict[str, int] = field(default_factory=dict)
    order: dict[str, Any] = field(default_factory=dict)
    """The values that decide which samples a step reads; `data` counts in this order."""
    spikes: SpikeMonitor = field(default_factory=SpikeMonitor)
    wandb_id: str | None = None
    seconds: float = 0.0
    """Time that training took up to `step`, all starts together."""
    compiled: bool | None = None
    """Whether blocks and loss are compiled; None until that is decided."""
    mkl_mode: str = field(default_factory=lambda: os.environ.get(MKL_MODE, ""))
    """The value of MKL_CBWR with which the run computes."""

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "spikes": self.spikes.state_dict()}

    @classmethod
    def of(cls, values: dict[str, Any]) -> "LoopState":
        """Build the state from the output of `state_dict`."""
        spikes = SpikeMonitor()
        spikes.load_state_dict(values["spikes"])
        names = ("step", "data", "wandb_id")
        order = {"data.packing": "stream", **values["order"]}
        known = {name: values[name] for name in names}
        added = {name: values.get(name, value) for name, value in OF_OLDER_CHECKPOINTS.items()}
        return cls(**known, **added, order=order, spikes=spikes)


def save(t: Training, state: LoopState, checkpointer: Checkpointer, final: bool = False) -> None:
    """Start an asynchronous checkpoint. Every rank must call this.

    Args:
        final: whether this is the run's last checkpoint, whose failure ends the run.
    """
    rng = rng_tensors(t.device)
    shapes = {name: list(param.shape) for name, param in t.params.items()}
    meta = {"parameters": shapes, "ranks": dist.get_world_size(), "loop": state.state_dict()}
    checkpointer.save(state.step, {**t.tensors(), **rng}, meta, final)


def restore(t: Training, state: LoopState, path: Path, ranks: int) -> None:
    """Fill parameters, optimizer and random generators from a checkpoint, on whatever mesh; raises
    CheckpointError if it cannot be read.

    Args:
        state: the content of its state.json, see `continued`.
        ranks: number of ranks that wrote the checkpoint; other ranks keep their own generators.
    """
    rng = rng_tensors(t.device) if dist.get_rank() < ranks else {}
    load_tensors(path, {**t.tensors(), **rng})
    t.weights.changed()
    t.guard.load(*state.spikes.windows())
    try:
        for name, value in rng.items():
            if name.startswith("rng.cuda"):
                torch.cuda.set_rng_state(value, t.device)
            else:
                torch.set_rng_state(value)
    except RuntimeError as error:
        raise CheckpointError(f"{path} holds no state of a random generator: {error}") from error


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """Return this rank's random generator states, uint8."""
    rng = {f"rng.cpu.{dist.get_rank()}": torch.get_rng_state()}
    if device.type == "cuda":
        rng[f"rng.cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state(device)
    return rng
