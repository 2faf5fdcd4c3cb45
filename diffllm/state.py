"""What a checkpoint holds of a run besides its parameters, and how a run goes on from one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.build import Training
from diffllm.checkpoint import Checkpointer, check_loop, check_parameters, load_tensors, read_state
from diffllm.config.changes import Changes, described, is_allowed
from diffllm.errors import CheckpointError
from diffllm.spikes import SpikeMonitor


@dataclass
class LoopState:
    """All of a run's state that is not a tensor; JSON in checkpoints."""

    step: int = 0
    data: dict[str, int] = field(default_factory=dict)
    order: dict[str, Any] = field(default_factory=dict)
    """What decides which samples a step reads; `data` counts in it."""
    spikes: SpikeMonitor = field(default_factory=SpikeMonitor)
    wandb_id: str | None = None
    heldout_loss: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "spikes": self.spikes.state_dict()}

    def changes(self, saved: dict[str, Any], allowed: list[str]) -> Changes:
        """How this run's order of data differs from that of a saved loop state.

        Raises:
            CheckpointError: it does, in keys that are not `allowed`.
        """
        there = saved["order"]
        keys = [key for key in self.order if there.get(key) != self.order[key]]
        changes = {key: (there.get(key), self.order[key]) for key in keys}
        if refused := [key for key in changes if not is_allowed(key, allowed)]:
            raise CheckpointError(
                f"the checkpoint belongs to another order of data ({described(changes)}); to go on "
                f"from it all the same: run.allow_changes=[{','.join([*allowed, *refused])}]"
            )
        return changes

    def load_state_dict(self, state: dict[str, Any], allowed: list[str]) -> None:
        """Continue from a saved state; another order of data begins at its first sample.

        Raises:
            CheckpointError: the order of data differs in keys that are not `allowed`.
        """
        changes = self.changes(state, allowed)
        self.spikes.load_state_dict(state["spikes"])
        for name in ("step", "data", "wandb_id", "heldout_loss"):
            setattr(self, name, state[name])
        if changes.keys() - {"global_batch_size"}:
            self.data = {}


def save(t: Training, state: LoopState, checkpointer: Checkpointer, final: bool = False) -> None:
    """Start an asynchronous checkpoint; every rank calls it.

    Args:
        final: nothing is trained behind it, so that its failure ends the run.
    """
    rng = rng_tensors(t.device)
    shapes = {name: list(param.shape) for name, param in t.params.items()}
    meta = {"parameters": shapes, "ranks": dist.get_world_size(), "loop": state.state_dict()}
    checkpointer.save(state.step, {**t.tensors(), **rng}, meta, final)


def restore(t: Training, state: LoopState, path: Path) -> None:
    """Continue from a checkpoint, whatever mesh wrote it; raises CheckpointError."""
    check_parameters(path, t.params)
    saved = read_state(path)
    check_loop(path, saved)
    try:
        state.load_state_dict(saved["loop"], t.cfg.run.allow_changes)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: state.json lacks {error}") from error
    rng = rng_tensors(t.device) if dist.get_rank() < saved["ranks"] else {}
    load_tensors(path, {**t.tensors(), **rng})
    t.weights.changed()
    t.guard.load(state.spikes)
    try:
        for name, value in rng.items():
            if name.startswith("rng.cuda"):
                torch.cuda.set_rng_state(value, t.device)
            else:
                torch.set_rng_state(value)
    except RuntimeError as error:
        raise CheckpointError(f"{path} holds no state of a random generator: {error}") from error


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """This rank's random number generators, uint8."""
    rng = {f"rng.cpu.{dist.get_rank()}": torch.get_rng_state()}
    if device.type == "cuda":
        rng[f"rng.cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state(device)
    return rng
