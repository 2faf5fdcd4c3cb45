"""The first values of a run's parameters: a checkpoint, weights alone, or initial values."""

from typing import Any

import torch

from diffllm.config.compose import variant_config
from diffllm.core.errors import DataError
from diffllm.data import Prepared, training_samples
from diffllm.distributed.consistency import check_tensors
from diffllm.distributed.gradients import local
from diffllm.distributed.world import World
from diffllm.model.config import InitMatch
from diffllm.model.transformer import write_factors
from diffllm.training.build import Training
from diffllm.training.process import Process
from diffllm.training.start import Claimed
from diffllm.training.state import LoopState, restore
from diffllm.training.weights import start_from

BASELINE = "standard"
SEQUENCES = 8
"""Number of sequences to measure: the first ones in data order."""


def fill(
    t: Training, here: Process, claimed: Claimed, data: Prepared, state: LoopState
) -> dict[str, Any]:
    """Fill parameters from a checkpoint or weights, or apply model.init_match; compare ranks.

    Every rank must call this. Returns "weights" or "init_match" for run.json; else an empty dict.

    Args:
        state: the loop state of the checkpoint, from which the guard continues.
    """
    facts: dict[str, Any] = {}
    if claimed.checkpoint:
        here.watch.reached(f"the reading of {claimed.checkpoint.name}")
        restore(t, state, claimed.checkpoint, claimed.ranks)
    elif claimed.weights:
        here.watch.reached(f"the reading of {claimed.weights}")
        facts["weights"] = start_from(t, claimed.weights)
    elif t.cfg.model.init_match is not InitMatch.none:
        facts["init_match"] = match_initial_values(t, data, here.world)
    check_tensors(t.tensors(), t.meshes.dense.size(1))
    return facts


def match_initial_values(t: Training, data: Prepared, world: World) -> list[float]:
    """Scale `wo` as model.init_match says, and return the factor of each layer.

    Only rank 0 measures, so that values do not depend on the number of ranks.
    """
    factors = world.broadcast_from_rank0("init_match", lambda: measured_factors(t, data))
    with torch.no_grad():
        for i, factor in enumerate(factors):
            local(t.params[f"layers.{i}.attention.wo.weight"]).mul_(factor)
    t.weights.changed()
    return factors


def measured_factors(t: Training, data: Prepared) -> list[float]:
    """Measure the factor of each layer on the first `SEQUENCES` sequences in data order."""
    cfg = t.cfg
    total = cfg.steps * cfg.global_batch_size
    first = training_samples(data, cfg.data, cfg.seq_len, cfg.seed, total)[range(SEQUENCES)]
    if isinstance(first, DataError):
        raise first
    tokens, _ = first
    baseline, documents = variant_config(BASELINE), t.documents(tokens) if t.documents else None
    return write_factors(cfg.model, baseline, tokens.to(t.device), documents)
