"""The explicit attention maps of a layer.

Shapes: B batch, T tokens (queries before keys), h heads of the variant: V1 has n_heads / 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffllm.model import Transformer
from diffllm.model.attention.base import Attention, Maps, Shown
from diffllm.model.rope import Rope

ROUNDING = 1e-4
"""How far a float32 softmax over many keys may be from a sum of 1."""


@dataclass
class LayerMaps:
    """The attention maps of one layer."""

    maps: Maps
    """"map", or "map 1", "map 2" and "difference": (B, h, T, T) each, float32 or wider."""
    by_query: dict[str, Tensor]
    """Values of each query, (B, h, T): "lambda", "gate" (mean over its channels), or "sink", the
    weight that an explicit sink keeps from the tokens. Empty for plain softmax."""

    @property
    def effective(self) -> Tensor:
        """The map that weights the values, before head norm and gate."""
        return list(self.maps.values())[-1]


@torch.no_grad()
def layer_maps(model: Transformer, tokens: Tensor, layer: int) -> LayerMaps:
    """The maps of `layer` (from 0) over tokens (B, T) int64, a document a row."""
    x = model.tok_embeddings(tokens)
    rope = model.rope(0, tokens.shape[1])
    for block in model.layers[:layer]:
        x, *_ = block(x, rope)
    block = model.layers[layer]
    return attention_maps(block.attention, block.attention_norm(x), rope)


def attention_maps(
    attention: Attention, x: Tensor, rope: Rope, mask: Tensor | None = None
) -> LayerMaps:
    """The causal maps of an attention module that reads x (B, T, D), normalised."""
    q, k, _ = attention.project(x, rope)
    shown: Shown = {}
    attention(x, rope, mask, show=shown)
    layer = LayerMaps(attention.maps(x, q, k, mask), {})
    batch, heads, length = layer.effective.shape[:3]
    if "lambda" in shown:
        by_head = shown["lambda"].expand(batch, length, heads)
        layer.by_query["lambda"] = by_head.transpose(1, 2)
    elif "gate" in shown:
        layer.by_query["gate"] = shown["gate"].mean(-1).transpose(1, 2)
    elif ((kept := 1 - layer.effective.sum(-1)) > ROUNDING).any():
        layer.by_query["sink"] = kept
    return layer
