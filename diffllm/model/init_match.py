"""Initial attention outputs as large as those of a baseline decoder: `model.init_match=write`.

Shapes: B batch, T tokens, D model width.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from diffllm.core.errors import ConfigError
from diffllm.model.attention.base import AttentionConfig
from diffllm.model.attention.masks import Documents
from diffllm.model.attention.ops import Backend
from diffllm.model.block import Block
from diffllm.model.config import ModelConfig
from diffllm.model.rope import Rope, RotaryEmbedding
from diffllm.model.transformer import initialise

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def write_factors(
    cfg: ModelConfig,
    baseline: AttentionConfig,
    tokens: Tensor,
    documents: Documents | None = None,
) -> list[float]:
    """Return one factor per layer for the initial `wo`, to match a decoder with baseline attention.

    The decoder of `cfg` and the baseline decoder differ only in their attention, `cfg.attention`
    and `baseline`. After each `wo` of the decoder of `cfg` is multiplied by its factor, the
    attention outputs of each layer have the same RMS in both decoders. The RMS is measured on the
    input `tokens` (B, T) int64. The function builds both decoders in float32, one layer at a time.
    If `documents` is given, queries see only keys of the same document. Raises ConfigError if a
    factor is not positive and finite.
    """
    device = tokens.device
    # SDPA, because flash-attn does not support float32.
    attention = replace(cfg.attention, backend=Backend.sdpa)
    baseline = replace(baseline, backend=Backend.sdpa)
    cfg = replace(cfg, attention=attention)
    baseline_cfg = replace(cfg, attention=baseline)

    table = partial(RotaryEmbedding, cfg.head_dim, cfg.seq_len, cfg.rope)
    rope = build_part(table, "rope.", cfg, device)
    embedding = partial(nn.Embedding, cfg.vocab_size, cfg.dim)
    x = reference = build_part(embedding, "tok_embeddings.", cfg, device)(tokens)
    if documents is None:
        length = tokens.shape[1]
        positions = rope(0, length)
    else:
        positions = rope.at(documents.positions)
    factors = []
    for i in range(cfg.n_layers):
        prefix = f"layers.{i}."
        goal = build_part(partial(Block, baseline_cfg, i), prefix, baseline_cfg, device)
        reference, goal_rms = with_write(goal, reference, positions, documents, tokens)
        block = build_part(partial(Block, cfg, i), prefix, cfg, device)
        _, rms = with_write(block, x, positions, documents, tokens)
        factor = (goal_rms / rms).item()
        if not 0 < factor < float("inf"):
            raise ConfigError(
                f"model.init_match=write cannot scale layer {i}: the RMS of the initial attention "
                f"output is {rms.item():.3g} in this model and {goal_rms.item():.3g} in the "
                "baseline, but both must be positive and finite; set model.init_match=none"
            )
        block.attention.wo.weight.mul_(factor)
        # Run the layer again: the next layer must be measured on the output with the new scale.
        x, _ = with_write(block, x, positions, documents, tokens)
        factors.append(factor)
    return factors


def build_part(build: Callable[[], M], prefix: str, cfg: ModelConfig, device: torch.device) -> M:
    """Build one submodule in float32, with the same initial values as in the complete decoder.

    `build` is called on the meta device and returns the submodule. For `prefix`, see `initialise`.
    """
    with torch.device("meta"):
        part = build()
    part.to_empty(device=device)
    initialise(part, cfg, prefix)
    return part


def with_write(
    block: Block,
    x: Tensor,
    rope: Rope,
    documents: Documents | None,
    tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Apply `block` to x (B, T, D); return the block output and the RMS of the attention output.

    `tokens` (B, T) and `documents` determine the attention mask.
    """
    mask = block.attention.training_mask(documents, tokens, x.dtype)
    out, stats, _ = block(x, rope, mask, diagnose=True)
    return out, stats["attn_write_rms"]
