"""Initial values that depend on the first data: those of `model.init_match`."""

import torch

from diffllm.build import Training
from diffllm.config.compose import variant_config
from diffllm.data import Prepared, training_samples
from diffllm.distributed.fsdp import local
from diffllm.distributed.world import World
from diffllm.errors import DataError
from diffllm.model.config import InitMatch
from diffllm.model.init_match import write_factors

BASELINE = "standard"
SEQUENCES = 8
"""The first sequences in the order of the data; those of step 0, unless it has fewer."""


def match_initial_values(t: Training, data: Prepared, world: World) -> list[float] | None:
    """Scale `wo` as model.init_match says; return the factor of each layer, None where it is off.

    Rank 0 measures, on the first sequences of step 0, and tells the others, so that values do not
    depend on the number of ranks.
    """
    cfg = t.cfg
    if cfg.model.init_match is InitMatch.none:
        return None

    def measured() -> list[float]:
        total = cfg.steps * cfg.global_batch_size
        first = training_samples(data, cfg.data, cfg.seq_len, cfg.seed, total)[range(SEQUENCES)]
        if isinstance(first, DataError):
            raise first
        tokens, _ = first
        return write_factors(
            cfg.model, variant_config(BASELINE), tokens.to(t.device), t.documents(tokens)
        )

    factors: list[float] = world.broadcast_from_rank0("init_match", measured)
    with torch.no_grad():
        for i, factor in enumerate(factors):
            local(t.params[f"layers.{i}.attention.wo.weight"]).mul_(factor)
    t.weights.changed()
    return factors
