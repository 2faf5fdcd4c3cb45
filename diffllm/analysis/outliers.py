"""Outliers of a trained model over fixed tokens: hidden states, attention logits, sinks, by layer.

Shapes: B batch, T tokens, N queries of a piece, h heads of a map, D model width.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from diffllm.analysis.spread import Spread
from diffllm.errors import CheckpointError
from diffllm.model import Transformer
from diffllm.model.attention.base import Attention, Maps, Shown
from diffllm.model.documents import Documents
from diffllm.model.probes import Probe, probe_at
from diffllm.model.stats import kurtosis, over_channels, values_rms

PIECE = 2**22
"""Weights of a map that are explicit at a time."""


class Mean:
    """The mean of values that come in pieces."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def add(self, values: Tensor) -> None:
        self.sum += values.double().sum().item()
        self.count += values.numel()

    @property
    def value(self) -> float | None:
        """None of no values."""
        return self.sum / self.count if self.count else None


class LayerOutliers:
    """The numbers of one layer, gathered piece by piece."""

    def __init__(self) -> None:
        self.hidden = Spread()
        self.channels = torch.zeros(0)
        """The largest magnitude of each channel of the hidden states, (D,)."""
        self.over_channels, self.context = Mean(), Mean()
        self.ratio, self.least, self.most = Mean(), math.inf, -math.inf
        self.logits: defaultdict[str, Spread] = defaultdict(Spread)
        self.weight: defaultdict[str, Mean] = defaultdict(Mean)
        self.share: defaultdict[str, Mean] = defaultdict(Mean)

    def add_hidden(self, x: Tensor) -> None:
        """Take the block's output (B, T, D)."""
        self.hidden.add(x)
        self.over_channels.add(kurtosis(x).expand(x.shape[:2]))
        largest = x.abs().flatten(0, 1).amax(0).cpu()
        self.channels = torch.maximum(self.channels, largest) if len(self.channels) else largest

    def add_context(self, context: Tensor, v: Tensor) -> None:
        """Take what enters `wo` (B, T, h, width), before a head norm, and the values."""
        rms = over_channels(context)
        ratio = rms / values_rms(v)
        self.context.add(rms)
        self.ratio.add(ratio)
        self.least = min(self.least, ratio.min().item())
        self.most = max(self.most, ratio.max().item())

    def add_maps(self, logits: Maps, maps: Maps, probe: Probe) -> None:
        """Take a piece of the maps (B, h, N, T), before the softmax and after it."""
        for name, scores in logits.items():
            self.logits[name].add(scores[probe.visible.expand_as(scores)])
        for name, weights in maps.items():
            seen = probe.visible.expand_as(weights)
            first = seen.int().argmax(-1, keepdim=True)
            others = seen.sum(-1) > 1  # a query that sees itself alone has no choice
            weight = weights.gather(-1, first).squeeze(-1)
            total = weights.abs().sum(-1)
            share = weight.abs() / torch.where(total > 0, total, 1)
            self.weight[name].add(weight[others])
            self.share[name].add(share[others])

    def numbers(self) -> dict[str, Any]:
        """Return all of it by name."""
        return {
            "hidden": {
                **self.hidden.numbers(),
                "kurtosis_over_channels": self.over_channels.value,
                "top_1_channel": int(self.channels.argmax()),
            },
            "logits": {name: spread.numbers() for name, spread in self.logits.items()},
            "sinks": {
                name: {"weight": self.weight[name].value, "share": self.share[name].value}
                for name in self.weight
            },
            "context_rms": self.context.value,
            "context_over_value_rms": {
                "mean": self.ratio.value,
                "min": self.least,
                "max": self.most,
            },
        }


@torch.no_grad()
def measure(
    model: Transformer, batches: Iterable[tuple[Tensor, Documents | None]]
) -> list[dict[str, Any]]:
    """Pass over batches, block by block, and return the numbers of each layer, by name.

    `hidden` are the block's outputs: magnitudes, their percentiles, kurtosis of all values together
    and over channels, mean over tokens. `logits` are q k / sqrt(d) of each map, before its softmax,
    of the keys that a query sees. `sinks` is the weight of each map on the first token that a query
    sees, signed, and its share of the sum of |weight|; means over heads, sequences and the queries
    that see more than themselves. `context_over_value_rms` is as in the table of metrics.

    Args:
        batches: tokens (B, T) int64 and, where attention stays inside them, their documents; all on
            the model's device.

    Raises CheckpointError for a layer whose values are not finite.
    """
    found = [LayerOutliers() for _ in model.layers]
    for tokens, documents in batches:
        x = model.tok_embeddings(tokens)
        rope, mask = model.whole_sequences(tokens, documents, x.dtype)
        for i, (layer, block) in enumerate(zip(found, model.layers, strict=True)):
            show: Shown = {}
            normed = block.attention_norm(x)
            block.attention(normed, rope, mask, show=show)
            layer.add_context(show["context"], show["v"])
            for piece in pieces(block.attention, tokens):
                probe = probe_at(piece, tokens.shape[1], documents)
                q, k = show["q"][:, piece], show["k"]
                maps = block.attention.maps(normed[:, piece], q, k, probe.visible)
                layer.add_maps(block.attention.logits(q, k), maps, probe)
            x, *_ = block(x, rope, mask)
            if not x.isfinite().all():
                raise CheckpointError(f"the output of layer {i} has values that are not finite")
            layer.add_hidden(x)
    return [layer.numbers() for layer in found]


def pieces(attention: Attention, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the positions of the queries (T,), so many at a time that their maps fit."""
    batch, length = tokens.shape
    size = max(1, PIECE // (batch * attention.n_query_heads * length))
    yield from torch.arange(length, device=tokens.device).split(size)
