"""Initial values of `wo` with which a variant's attention writes as much as another's at first.

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
from diffllm.model.attention.ops import Backend
from diffllm.model.config import ModelConfig
from diffllm.model.documents import Documents
from diffllm.model.rope import RotaryEmbedding
from diffllm.model.transformer import Block, initialise

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def write_factors(
    cfg: ModelConfig,
    baseline: AttentionConfig,
    tokens: Tensor,
    documents: Documents | None = None,
) -> list[float]:
    """Return a factor for the initial `wo` of each layer, the first one first.

    With them, the RMS over tokens and channels of what attention adds to the residual stream is, in
    every layer, that of a decoder that differs in `baseline` alone. Both decoders are made a layer
    at a time, in float32, with the initial values that they have by seed and name; a layer reads
    what the layers before it wrote with their factors.

    Args:
        tokens: (B, T) int64, on the device to compute on.
        documents: the tokens' documents, where attention stays inside them.

    Raises:
        ConfigError: an attention that writes nothing, or not a number.
    """
    device = tokens.device
    own = replace(cfg, attention=replace(cfg.attention, backend=Backend.sdpa))
    other = replace(cfg, attention=replace(baseline, backend=Backend.sdpa))

    rope = made(partial(RotaryEmbedding, cfg.head_dim, cfg.seq_len, cfg.rope), "rope.", cfg, device)
    embed = made(partial(nn.Embedding, cfg.vocab_size, cfg.dim), "tok_embeddings.", cfg, device)
    x = reference = embed(tokens)
    positions = rope(0, tokens.shape[1]) if documents is None else rope.at(documents.positions)
    factors = []
    for i in range(cfg.n_layers):
        goal = made(partial(Block, other, i), f"layers.{i}.", other, device)
        reference, wanted = with_write(goal, reference, positions, documents, tokens)
        block = made(partial(Block, own, i), f"layers.{i}.", own, device)
        _, written = with_write(block, x, positions, documents, tokens)
        factor = (wanted / written).item()
        if not 0 < factor < float("inf"):
            raise ConfigError(
                f"model.init_match=write: attention of layer {i} writes {written.item():.3g} "
                f"(RMS) where the baseline writes {wanted.item():.3g}: no factor matches them"
            )
        block.attention.wo.weight.mul_(factor)
        x, _ = with_write(block, x, positions, documents, tokens)
        factors.append(factor)
    return factors


def made(build: Callable[[], M], prefix: str, cfg: ModelConfig, device: torch.device) -> M:
    """Build a part of a decoder, float32 on `device`, with its initial values in the decoder."""
    with torch.device("meta"):
        part = build()
    part.to_empty(device=device)
    initialise(part, cfg, prefix)
    return part


def with_write(
    block: Block,
    x: Tensor,
    positions: tuple[Tensor, Tensor],
    documents: Documents | None,
    tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a block's output (B, T, D) and the RMS of what its attention writes, a scalar."""
    mask = block.attention.training_mask(documents, tokens, x.dtype)
    out, stats, _ = block(x, positions, mask, diagnose=True)
    return out, stats["attn_write_rms"]
