"""Initial parameters from another model, or scaled to match another variant (model.init_match)."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffllm.checkpoint.hf.model_directory import ModelDirectory
from diffllm.checkpoint.manifest import read_state, tokens_of
from diffllm.config import TrainConfig
from diffllm.config.changes import changes_text, is_of_model
from diffllm.config.compose import variant_config
from diffllm.config.origin import named_in, origin_of
from diffllm.config.run_config import CARRIED_PREFIXES
from diffllm.config.saved import changes_to
from diffllm.core.errors import CheckpointError, DataError
from diffllm.data.prepared import Prepared
from diffllm.distributed.gradients import local
from diffllm.distributed.world import World
from diffllm.model.init_match import write_factors
from diffllm.training.build import Training
from diffllm.training.state import samples_of

BASELINE = "standard"
MATCH_SEQUENCES, MATCH_TOKENS = 8, 32_768
"""Sequences that `match_initial_values` reads: as many as these tokens hold, at least one."""


def match_initial_values(t: Training, data: Prepared, world: World) -> list[float]:
    """Multiply the output projection `wo` of each attention layer by a factor (model.init_match).

    With these factors, the attention output of each layer initially has the same RMS as with
    standard attention. Rank 0 measures the factors on training sequences. Return one factor per
    layer. Every rank must call this.
    """
    factors = world.broadcast_from_rank0("init_match", partial(measured_factors, t, data))
    with torch.no_grad():
        for i, factor in enumerate(factors):
            local(t.params[f"layers.{i}.attention.wo.weight"]).mul_(factor)
    t.weights.changed()
    return factors


def measured_factors(t: Training, data: Prepared) -> list[float]:
    sequences = MATCH_TOKENS // t.cfg.seq_len
    count = max(1, min(MATCH_SEQUENCES, sequences))
    batch = samples_of(t.cfg, data)[range(count)]
    if isinstance(batch, DataError):
        raise batch
    inputs, _ = batch
    documents = t.documents(inputs).to(t.device) if t.documents else None
    tokens = inputs.to(t.device)
    return write_factors(t.cfg.model, variant_config(BASELINE), tokens, documents)


def start_from(t: Training, path: Path) -> dict[str, Any]:
    """Load the carried tensors from a checkpoint, or parameters from a Hugging Face directory.

    Return an entry of run.json. Its keys "path", "step", "tokens", "corpus" and "bos_token"
    describe the other model; "tokens" includes all earlier stages. Its key "differs" lists the
    model settings that differ between the other model and this run. Every rank must call this.
    """
    from diffllm.checkpoint.reader import load_tensors  # A slow import: loads DCP.

    origin = origin_of(path)
    tensors = {}
    for name, tensor in t.tensors().items():
        if name.startswith(carried(t.cfg)):
            tensors[name] = tensor
    if origin.directory is None:
        load_tensors(path, tensors)
    else:
        copy_from_directory(t, path, origin.directory, tensors)
    t.weights.changed()
    changes = changes_to(origin.model, t.cfg.model, is_of_model)
    model_changes = {f"model.{key}": pair for key, pair in changes.items()}
    state = read_state(path) if origin.run else {}
    tokens = None
    loop = state.get("loop")
    if loop:
        earlier_stages = origin.facts.get("previous") or {}
        tokens = earlier_stages.get("tokens", 0) + tokens_of(loop)
    return {
        "path": str(path),
        "step": state.get("step"),
        "tokens": tokens,
        "differs": changes_text(model_changes, "the weights") or None,
        "corpus": origin.facts.get("corpus"),
        "bos_token": " ".join(origin.text_prefix) or None,
    }


def copy_from_directory(
    t: Training, path: Path, directory: ModelDirectory, tensors: dict[str, Tensor]
) -> None:
    """Copy all tensors of the Hugging Face directory `path` to `tensors`, which are by name.

    The values of other tensors do not change. Raises CheckpointError if the model lacks a tensor.
    """
    for name in directory.names:
        if f"model.{name}" not in tensors:
            raise CheckpointError(
                f"{path} contains the tensor {name}, but the model does not; "
                "use the model config of these weights"
            )
        block, offset, _ = t.weights.block(tensors[f"model.{name}"])
        # Every rank reads the whole tensor, and copies its shard of it.
        part = []
        for start, size in zip(offset, block.shape, strict=True):
            part.append(slice(start, start + size))
        block.copy_(directory.tensor(name)[tuple(part)])


def carried(cfg: TrainConfig) -> tuple[str, ...]:
    """Return the prefixes of the tensors that this run takes over from another model."""
    named = named_in(cfg.resume)
    return CARRIED_PREFIXES[named.kind] if named else ()


def previous_stage(cfg: TrainConfig, origin: Path | None) -> Path | None:
    """Return `origin` if this is the checkpoint of resume=stage:PATH, else None."""
    return origin if carried(cfg) == CARRIED_PREFIXES["stage"] else None
