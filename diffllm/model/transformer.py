"""The decoder: Block, Transformer, initialisation.

Shapes: B batch, T tokens, D model width, V vocabulary, L layers.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.model.attention.base import Attention, KVCache, Shown
from diffllm.model.config import ModelConfig
from diffllm.model.ffn import SwiGLU
from diffllm.model.init import Initializer, Shard, named, whole
from diffllm.model.loss import Loss, chunk_loss, chunked_cross_entropy
from diffllm.model.norm import RMSNorm
from diffllm.model.rope import Rope, RotaryEmbedding
from diffllm.model.stats import Stats, block_stats, stack_stats


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, cfg: ModelConfig, layer_idx: int):
        super().__init__()
        self.attention_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.attention: Attention = cfg.attention.build(cfg, layer_idx)
        self.ffn_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.ffn = SwiGLU(cfg.dim, cfg.ffn_dim)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        diagnose: bool = False,
    ) -> tuple[Tensor, Stats]:
        """x (B, T, D) -> (B, T, D) and, when diagnosing, this layer's statistics."""
        show: Shown | None = {} if diagnose else None
        x = x + self.attention(self.attention_norm(x), rope, mask, cache, show)
        x = x + self.ffn(self.ffn_norm(x))
        return x, block_stats(x, show)


class TrainOutput(NamedTuple):
    """What a training forward pass gives."""

    objective: Tensor
    """Sum over tokens of loss and weighted z-loss; differentiable, float32."""
    loss: Loss
    stats: Stats
    """Each (L,), empty unless diagnosing."""


class Transformer(nn.Module):
    """Llama-style decoder over any attention variant."""

    layers: Any  # nn.ModuleList of Block

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.tok_embeddings = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.rope = RotaryEmbedding(cfg.head_dim, cfg.seq_len, cfg.rope.theta)
        self.layers = nn.ModuleList(Block(cfg, i) for i in range(cfg.n_layers))
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        if not cfg.tie_embeddings:
            self.output = nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        self.chunk_loss: Any = chunk_loss

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        caches: list[KVCache] | None = None,
        diagnose: bool = False,
    ) -> Any:
        """tokens (B, T) int64 -> logits (B, T, V), or a TrainOutput when targets are given.

        Args:
            targets: (B, T) int64.
            caches: one a layer, for decoding; tokens then follow what the caches hold.
            diagnose: also return each layer's statistics (with targets).
        """
        start = caches[0].length if caches else 0
        if start + tokens.shape[1] > self.cfg.seq_len:
            raise ValueError(
                f"{start + tokens.shape[1]} positions, but model.seq_len is {self.cfg.seq_len}"
            )
        rope = self.rope(start, tokens.shape[1])
        x = self.tok_embeddings(tokens)
        stats: list[Stats] = []
        for i, layer in enumerate(self.layers):
            x, layer_stats = layer(x, rope, None, caches[i] if caches else None, diagnose)
            stats.append(layer_stats)
        x = self.norm(x)
        if targets is None:
            return F.linear(x, self.output_weight)
        objective, loss = chunked_cross_entropy(
            x.flatten(0, 1),
            self.output_weight,
            targets.flatten(),
            self.cfg.z_loss,
            self.cfg.loss_chunk,
            self.chunk_loss,
        )
        return TrainOutput(objective, loss, stack_stats(stats))

    @property
    def output_weight(self) -> Tensor:
        """(V, D): the output projection, or the embedding when tied."""
        return self.tok_embeddings.weight if self.cfg.tie_embeddings else self.output.weight

    def reset_parameters(self, shard: Shard = whole) -> None:
        """Fill every parameter and buffer; values depend on (init_seed, name) only.

        Args:
            shard: how to find the rows that this process holds of a parameter.
        """
        cfg = self.cfg
        init = Initializer(cfg.init_seed, named(self), shard)
        out_std = cfg.init_std / math.sqrt(2 * cfg.n_layers)
        self.rope.reset_parameters()
        init.normal_(self.tok_embeddings.weight, cfg.init_std, truncate=3)
        for layer in self.layers:
            layer.attention.reset_parameters(init, cfg.init_std, out_std)
            layer.ffn.reset_parameters(init, cfg.init_std, out_std)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                init.constant_(module.weight, 1.0)
        if not cfg.tie_embeddings:
            init.normal_(self.output.weight, cfg.init_std, truncate=3)

    def new_caches(
        self, batch: int, length: int, dtype: torch.dtype | None = None
    ) -> list[KVCache]:
        """Empty caches of `length` positions; `dtype` is the parameters' by default."""
        weight = self.tok_embeddings.weight
        return [
            KVCache(
                layer.attention.kv_cache_shape(batch, length), dtype or weight.dtype, weight.device
            )
            for layer in self.layers
        ]

    def flops_per_token(self) -> float:
        """Training FLOPs a token at `cfg.seq_len`: matrix products, attention counted causally."""
        layers = sum(
            layer.attention.flops_per_token(self.cfg.seq_len) + layer.ffn.flops_per_token()
            for layer in self.layers
        )
        return layers + 6 * self.output_weight.numel()

    def kv_cache_bytes_per_token(self) -> int:
        """Bytes that one position of one sequence holds in all caches, in bf16."""
        return sum(layer.attention.kv_cache_bytes_per_token() for layer in self.layers)


def build_model(cfg: ModelConfig) -> Transformer:
    """An initialised decoder in float32 on the current default device."""
    model = Transformer(cfg)
    if model.tok_embeddings.weight.device.type != "meta":
        model.reset_parameters()
    return model
