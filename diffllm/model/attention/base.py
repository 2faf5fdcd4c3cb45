"""The contract between a decoder block and an attention variant.

A variant is one file beside this one: a dataclass config that is registered under its name and
builds a module, and the module itself. It usually subclasses `Attention` and writes `context`.

Shapes: B batch, T query tokens, S key tokens, D model width, H heads, K kv heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from diffllm.model.init import Initializer
from diffllm.model.norm import RMSNorm
from diffllm.model.rope import Rope, apply_rope

if TYPE_CHECKING:
    from diffllm.model.config import ModelConfig

Shown = dict[str, Tensor]
"""What a layer lays open for diagnostics: "context" (B, T, heads, width), "lambda", "gate"."""


@dataclass
class AttentionConfig:
    """Base of every variant's config; composing it without a variant is an error."""

    def build(self, model: ModelConfig, layer_idx: int) -> Attention:
        """The module of layer `layer_idx` (from 0)."""
        raise NotImplementedError(f"{type(self).__name__} does not build an attention module")

    def validate(self, model: ModelConfig) -> None:
        """Raise ConfigError for a model shape that this variant cannot take."""


class KVCache:
    """Keys and values of the positions decoded so far, preallocated: (B, S_max, K, d) each."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ):
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v (B, T, K, d); return all keys and values so far, (B, S, K, d)."""
        start, self.length = self.length, self.length + k.shape[1]
        if self.length > self.k.shape[1]:
            raise ValueError(f"KV cache of {self.k.shape[1]} positions is full")
        self.k[:, start : self.length] = k
        self.v[:, start : self.length] = v
        return self.k[:, : self.length], self.v[:, : self.length]


class Attention(nn.Module):
    """Projections, RoPE and cache that the variants share.

    Args:
        model: the decoder's shape.
        n_query_heads: heads that `wq` makes; the baseline's H unless the variant says otherwise.
        context_dim: width of what enters `wo`; n_query_heads * head_dim by default.
    """

    fp32_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of own parameters that mixed precision must leave in float32."""

    def __init__(
        self, model: ModelConfig, n_query_heads: int | None = None, context_dim: int | None = None
    ):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = (
            model.n_heads,
            model.n_kv_heads,
            model.head_dim,
        )
        self.n_query_heads = n_query_heads or model.n_heads
        context_dim = context_dim or self.n_query_heads * self.head_dim
        kv_dim = self.n_kv_heads * self.head_dim
        self.wq = nn.Linear(model.dim, self.n_query_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(model.dim, kv_dim, bias=False)
        self.wv = nn.Linear(model.dim, kv_dim, bias=False)
        self.wo = nn.Linear(context_dim, model.dim, bias=False)
        if model.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, model.norm_eps)
            self.k_norm = RMSNorm(self.head_dim, model.norm_eps)
        self.qk_norm = model.qk_norm

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        show: Shown | None = None,
    ) -> Tensor:
        """x (B, T, D), normalised -> (B, T, D).

        Args:
            rope: tables of the T positions.
            mask: boolean, True where a query may look, broadcastable to (B, H, T, S);
                None is causal.
            cache: earlier positions; extended in place.
            show: filled with what diagnostics read, when given.
        """
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        context = self.context(x, q, k, v, mask, show)
        if show is not None:
            show.setdefault("context", context)
        return self.wo(context.flatten(2))

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, D) -> q (B, T, n_query_heads, d), k and v (B, T, K, d), q and k rotated."""
        q = self.wq(x).unflatten(-1, (self.n_query_heads, self.head_dim))
        k = self.wk(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        v = self.wv(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rope(q, rope), apply_rope(k, rope), v

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, show: Shown | None
    ) -> Tensor:
        """The vectors (B, T, heads, width) that enter `wo`: what a variant is about."""
        raise NotImplementedError

    def reset_parameters(self, init: Initializer, std: float, out_std: float) -> None:
        """Truncated normal; the output projection at `out_std`."""
        for linear in (self.wq, self.wk, self.wv):
            init.normal_(linear.weight, std, truncate=3)
        init.normal_(self.wo.weight, out_std, truncate=3)
        if self.qk_norm:
            init.constant_(self.q_norm.weight, 1.0)
            init.constant_(self.k_norm.weight, 1.0)

    def flops_per_token(self, seq_len: int) -> float:
        """Training FLOPs a token: projections and causal maps, forward and backward."""
        matrices = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        return 6 * matrices + self.map_flops_per_token(seq_len)

    def map_flops_per_token(self, seq_len: int, value_dim: int | None = None) -> float:
        """Training FLOPs a token of q k and of weights times v, over (seq_len + 1) / 2 keys."""
        width = self.head_dim + (value_dim or self.head_dim)
        return 3 * 2 * self.n_query_heads * width * (seq_len + 1) / 2

    def kv_cache_shape(self, batch: int, length: int) -> tuple[int, int, int, int]:
        """Shape of the key cache and of the value cache: (B, S, K, d)."""
        return batch, length, self.n_kv_heads, self.head_dim

    def kv_cache_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes that one position of one sequence holds in this layer's cache (bf16: 2)."""
        _, _, heads, width = self.kv_cache_shape(1, 1)
        return 2 * heads * width * bytes_per_value
