"""Initial parameters from another model, or scaled to match another variant (model.init_match)."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffllm.checkpoint.hf.model_directory import ModelDirectory
from diffllm.checkpoint.manifest import read_state, tokens_of
from diffllm.config.changes import changes_text, is_of_model
from diffllm.config.compose import variant_config
from diffllm.config.origin import origin_of
from diffllm.config.run_config import CARRIED_PREFIXES
from diffllm.config.saved import changes_to
from diffllm.core.errors import CheckpointError, DataError
from diffllm.data.prepared import Prepared
from diffllm.distributed.consistency import check_tensors
from diffllm.distributed.gradients import local
from diffllm.distributed.world import World
from diffllm.model.config import InitMatch
from diffllm.model.init_match import write_factors
from diffllm.training.build import Training
from diffllm.training.claim import Claimed
from diffllm.training.process import Process
from diffllm.training.starting_point import carried
from diffllm.training.state import LoopState, restore, samples_of

BASELINE = "standard"
MATCH_SEQUENCES, MATCH_TOKENS = 8, 32_768
"""Sequences that `match_initial_values` reads: as many as these tokens hold, at least one."""


def fill(
    t: Training, process: Process, claimed: Claimed, data: Prepared, state: LoopState
) -> dict[str, Any]:
    """Set the initial parameters: load a checkpoint or weights, or apply model.init_match.

    Return the new entry of run.json as a dict: "weights" after resume=weights:PATH, "previous"
    after resume=stage:PATH, "init_match" after model.init_match. Without a new entry, the dict is
    empty. Every rank must call this function.
    """
    facts: dict[str, Any] = {}
    if claimed.checkpoint:
        process.watch.reached(f"the loading of {claimed.checkpoint.name}")
        restore(t, state, claimed.checkpoint, claimed.ranks)
    elif claimed.origin:
        process.watch.reached(f"the loading of {claimed.origin}")
        key = "previous" if carried(t.cfg) == CARRIED_PREFIXES["stage"] else "weights"
        facts[key] = start_from(t, claimed.origin)
    elif t.cfg.model.init_match is not InitMatch.none:
        facts["init_match"] = match_initial_values(t, data, process.world)
    check_tensors(t.tensors(), t.meshes.dense.size(1))
    return facts


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
