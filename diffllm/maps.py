"""The explicit attention maps of one layer of a decoder.

Shapes: T tokens, h heads of the variant's context.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffllm.model import Transformer
from diffllm.model.attention.base import Shown


@dataclass
class LayerMaps:
    """What a layer attends to in one sequence."""

    maps: dict[str, Tensor]
    """Each (h, T queries, T keys), float32; the last is what weights the values."""
    strength: Tensor | None
    """lambda or the gate (mean over channels) of each head and query, (h, T) float32."""
    strength_name: str
    """lambda or gate; empty where the variant has neither."""

    @property
    def effective(self) -> Tensor:
        """The map that weights the values, (h, T, T); negative in places where it is signed."""
        return list(self.maps.values())[-1]


@torch.no_grad()
def layer_maps(model: Transformer, tokens: Tensor, layer: int) -> LayerMaps:
    """The maps of `layer` (from 0) for tokens (T,) int64."""
    tokens = tokens.unsqueeze(0)
    x = model.tok_embeddings(tokens)
    rope, _ = model.whole_sequences(tokens, None, x.dtype)
    for block in model.layers[:layer]:
        x, _ = block(x, rope)
    block = model.layers[layer]
    show: Shown = {}
    x = block.attention_norm(x)
    q, k, _ = block.attention.project(x, rope)
    maps = {name: m[0].float() for name, m in block.attention.maps(x, q, k).items()}
    block.attention(x, rope, show=show)
    name = next((name for name in ("lambda", "gate") if name in show), "")
    if not name:
        return LayerMaps(maps, None, "")
    heads, length = list(maps.values())[-1].shape[:2]
    strength = show[name].float()
    strength = strength.mean(-1) if strength.ndim == 4 else strength  # a gate's channels
    return LayerMaps(maps, strength.expand(1, length, heads)[0].T, name)
