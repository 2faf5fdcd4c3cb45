"""Differential attention, first version (Ye et al., ICLR 2025, arXiv 2410.05258).

Shapes: H and K are the baseline's heads, so there are H/2 differential heads and K/2 kv groups
whose values are 2d wide.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffllm.errors import ConfigError
from diffllm.model.attention.base import Attention, AttentionConfig, Shown
from diffllm.model.attention.ops import attend, attention_weights, weighted
from diffllm.model.config import ModelConfig
from diffllm.model.init import Initializer
from diffllm.model.norm import RMSNorm
from diffllm.registry import schema


@schema(group="attention", name="diff_v1", package="model.attention")
@dataclass
class DiffV1Config(AttentionConfig):
    head_norm: bool = True
    """RMSNorm over the 2d channels of a head; without it the factor (1 - lambda_init) stays."""
    head_norm_eps: float = 1e-5
    lambda_init: float | None = None
    """One constant for all layers; null: 0.8 - 0.6 exp(-0.3 l)."""
    clamp: bool = False
    """Clamp the map at 0 and renormalise it: needs the explicit map, for small models only."""

    def build(self, model: ModelConfig, layer_idx: int) -> "DiffV1Attention":
        return DiffV1Attention(model, self, layer_idx)

    def validate(self, model: ModelConfig) -> None:
        for name, heads in (("n_heads", model.n_heads), ("n_kv_heads", model.n_kv_heads)):
            if heads % 2:
                raise ConfigError(
                    f"model.{name}={heads} must be even for attention=diff_v1: "
                    "heads are used in pairs"
                )


def lambda_init_at(layer_idx: int) -> float:
    """0.8 - 0.6 exp(-0.3 l), l from 0 (section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)


class DiffV1Attention(Attention):
    """context = RMSNorm(softmax(q1 k1) v - lambda softmax(q2 k2) v) * (1 - lambda_init).

    Adjacent heads are a pair: differential head i uses q[2i], q[2i+1] and, with j = i // (H/K),
    k[2j], k[2j+1] and the 2d-wide v[j], as the reference FlashAttention files do.
    """

    fp32_parameters = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    lambda_q1: Tensor
    lambda_k1: Tensor
    lambda_q2: Tensor
    lambda_k2: Tensor
    lambda_init: Tensor

    def __init__(self, model: ModelConfig, cfg: DiffV1Config, layer_idx: int):
        super().__init__(model)
        for name in self.fp32_parameters:
            self.register_parameter(name, nn.Parameter(torch.empty(self.head_dim)))
        if cfg.head_norm:
            self.head_norm = RMSNorm(2 * self.head_dim, cfg.head_norm_eps)
        self.cfg, self.layer_idx = cfg, layer_idx
        # A tensor, not a float: layers with different constants share one compiled graph.
        self.register_buffer("lambda_init", torch.empty(()), persistent=False)

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, show: Shown | None
    ) -> Tensor:
        wide_v = v.unflatten(2, (-1, 2)).flatten(3)
        lam = self.lambda_value()
        if self.cfg.clamp:
            weights1, weights2 = attention_weights(by_map(q), by_map(k), mask).chunk(2, dim=1)
            context = weighted(clamped(weights1 - lam * weights2), wide_v).to(x.dtype)
        else:
            maps = attend(by_map(q), by_map(k), torch.cat((wide_v, wide_v), dim=2), mask)
            attn1, attn2 = maps.chunk(2, dim=2)
            context = (attn1 - lam * attn2).to(x.dtype)
        if show is not None:
            show["context"], show["lambda"] = context, lam
        normed = self.head_norm(context) if self.cfg.head_norm else context
        return (normed * (1 - self.lambda_init)).to(x.dtype)

    def lambda_value(self) -> Tensor:
        """exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init, float32 ()."""
        first = torch.exp((self.lambda_q1 * self.lambda_k1).sum())
        second = torch.exp((self.lambda_q2 * self.lambda_k2).sum())
        return first - second + self.lambda_init

    def reset_parameters(self, init: Initializer, std: float, out_std: float) -> None:
        super().reset_parameters(init, std, out_std)
        for name in self.fp32_parameters:
            init.normal_(getattr(self, name), 0.1)
        if self.cfg.head_norm:
            init.constant_(self.head_norm.weight, 1.0)
        constant = self.cfg.lambda_init
        self.lambda_init.fill_(lambda_init_at(self.layer_idx) if constant is None else constant)

    def map_flops_per_token(self, seq_len: int, value_dim: int | None = None) -> float:
        return super().map_flops_per_token(seq_len, value_dim=2 * self.head_dim)


def clamped(weights: Tensor) -> Tensor:
    """Negative weights to 0, the rest to sum 1; a row without a positive weight is all zeros.

    weights (..., T, S), differences of two maps.
    """
    positive = weights.clamp_min(0)
    total = positive.sum(-1, keepdim=True)
    return positive / torch.where(total > 0, total, 1)


def by_map(heads: Tensor) -> Tensor:
    """(B, T, 2n, d) of adjacent pairs -> all first members, then all second members."""
    return heads.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2, 3)
