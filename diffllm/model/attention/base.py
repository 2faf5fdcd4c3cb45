"""The contract between a decoder block and an attention variant.

A variant is one file beside this one: a dataclass config that is registered under its name and
builds a module, and the module itself. It usually subclasses `Attention` and writes `context`.

Shapes: B batch, T query tokens, S key tokens, D model width, H heads, K kv heads, d head_dim.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.core.bounds import bounded
from diffllm.model.attention.kernels import prepare_backend, training_kernel, training_mask
from diffllm.model.attention.ops import (
    Backend,
    Documents,
    Mask,
    attend,
    attention_scores,
    attention_weights,
)
from diffllm.model.auto_setting import AutoSetting
from diffllm.model.init import Initializer
from diffllm.model.rope import Rope, apply_rope

if TYPE_CHECKING:
    from diffllm.model.config import ModelConfig

Aux = dict[str, Tensor]
"""The tensors that a layer hands to diagnostics, by name: "q", "k" and "v" as projected, "context"
(B, T, heads, width), "lambda", "gate"."""

Maps = dict[str, Tensor]
"""Explicit maps by name, (B, heads, T, S) each; the last one weights the values."""


@dataclass
class AttentionConfig:
    """The base of every variant's config; composing it without a variant is an error."""

    backend: Backend = Backend.sdpa
    """The kernel of training; decoding goes through SDPA, or explicit maps with `reference`."""
    context_scale: float = bounded(1.0, above=0)
    """Fixed factor on what enters `wo`: a control for how much attention writes."""

    def build(self, model: ModelConfig, layer_idx: int) -> Attention:
        """Return the module of layer `layer_idx` (from 0)."""
        raise NotImplementedError(f"{type(self).__name__} does not build an attention module")

    def validate(self, model: ModelConfig) -> None:
        """Raise ConfigError for a model shape that this variant cannot take."""

    def kernel_width(self, model: ModelConfig, device: torch.device) -> int:
        """Return the width of the widest of queries, keys and values on `device`."""
        return model.head_dim

    @property
    def explicit_mask(self) -> bool:
        """Whether documents are masked by a boolean tensor, because no kernel knows this map."""
        return False

    def choices(
        self, model: ModelConfig, device: torch.device, dtype: torch.dtype, documents: bool
    ) -> dict[str, AutoSetting]:
        """Decide what is left to the device in training, by name: "attention" is the kernel.

        `dtype` is that of queries and keys; with `documents`, they see their own document only.
        """
        return {"attention": self.kernel(model, device, dtype, documents)}

    def kernel(
        self, model: ModelConfig, device: torch.device, dtype: torch.dtype, documents: bool
    ) -> AutoSetting:
        """Choose the `Kernel` of training; arguments as for `choices`."""
        width = self.kernel_width(model, device)
        return training_kernel(self.backend, device, dtype, width, documents, self.explicit_mask)

    def settled(self, model: ModelConfig, device: torch.device) -> AttentionConfig:
        """Return this config with `device`'s choices of tensor shapes filled in."""
        return self

    def prepare(
        self,
        model: ModelConfig,
        device: torch.device,
        dtype: torch.dtype | None = None,
        documents: bool = False,
    ) -> None:
        """Make the kernel ready; raises ConfigError if it cannot run. Arguments as for
        `choices`."""
        width = self.kernel_width(model, device)
        prepare_backend(self.backend, device, width, dtype, documents and not self.explicit_mask)


class KVCache:
    """The keys and values of all decoded positions: (B, heads, S_max, width), preallocated."""

    def __init__(
        self,
        k_shape: tuple[int, int, int, int],
        v_shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ):
        self.k = torch.zeros(k_shape, dtype=dtype, device=device)
        self.v = torch.zeros(v_shape, dtype=dtype, device=device)
        self.length = 0
        """Positions in use, of the longest row."""
        self.lengths: Tensor | None = None
        """Positions in use by each row, (B,) int64; None where all rows are equally long."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v (B, T, heads, width), T = 1 if rows differ in length; return all so far.

        Both are (B, S, heads, width).
        """
        start, end = self.length, self.length + k.shape[1]
        if end > self.k.shape[2]:
            raise ValueError(f"KV cache of {self.k.shape[2]} positions is full")
        if self.lengths is not None and k.shape[1] > 1:
            raise ValueError(f"{k.shape[1]} positions at once after rows of different lengths")
        self.length = end
        for cached, new in ((self.k, k), (self.v, v)):
            if self.lengths is None:
                cached[:, :, start:end] = new.transpose(1, 2)
            else:
                rows = torch.arange(len(self.lengths), device=cached.device)
                cached[rows, :, self.lengths] = new[:, 0].to(cached.dtype)
        if self.lengths is not None:
            self.lengths = self.lengths + 1
        return (
            self.k[:, :, : self.length].transpose(1, 2),
            self.v[:, :, : self.length].transpose(1, 2),
        )

    def truncate(self, lengths: list[int]) -> None:
        self.length = max(lengths)
        same = len(set(lengths)) == 1
        self.lengths = None if same else torch.tensor(lengths, device=self.k.device)

    def copies(self, count: int, room: int) -> KVCache:
        """Copy the only row `count` times, with room for more positions."""
        made = copy.copy(self)
        made.k, made.v = (
            F.pad(x[:, :, : self.length].expand(count, -1, -1, -1), (0, 0, 0, room))
            for x in (self.k, self.v)
        )
        return made

    def keep(self, rows: list[int]) -> None:
        self.k, self.v = self.k[rows], self.v[rows]
        if self.lengths is not None:
            self.truncate(self.lengths[rows].tolist())


class Attention(nn.Module):
    """The base of the variants' modules: projections, RoPE and KV cache.

    Args:
        n_query_heads: heads that `wq` makes; the baseline's H unless the variant says otherwise.
        context_dim: width of what enters `wo`; n_query_heads * head_dim by default.
    """

    fp32_parameters: tuple[str, ...] = ()
    """Names of own parameters that mixed precision must leave in float32."""
    maps_note: str = ""
    """A remark on the maps for readers of a figure, empty if the names say enough."""

    def __init__(
        self, model: ModelConfig, n_query_heads: int | None = None, context_dim: int | None = None
    ):
        super().__init__()
        self.n_heads, self.n_kv_heads = model.n_heads, model.n_kv_heads
        self.head_dim = self.value_dim = model.head_dim
        self.n_query_heads = n_query_heads or model.n_heads
        self.backend = model.attention.backend
        self.context_scale = model.attention.context_scale
        self.kernel = partial(model.attention.kernel, model)
        context_dim = context_dim or self.n_query_heads * self.head_dim
        kv_dim = self.n_kv_heads * self.head_dim
        self.wq = nn.Linear(model.dim, self.n_query_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(model.dim, kv_dim, bias=False)
        self.wv = nn.Linear(model.dim, kv_dim, bias=False)
        self.wo = nn.Linear(context_dim, model.dim, bias=False)
        if model.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, model.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, model.norm_eps)
        self.qk_norm = model.qk_norm

    def statistics(self, aux: Aux) -> dict[str, Tensor]:
        """Return a variant's own statistics of this layer, float32 scalars by name; here none.

        `diffllm.metrics.table.add_metric` must know each name. `aux` contains what `context` adds.
        """
        return {}

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Mask = None,
        cache: KVCache | None = None,
        aux: Aux | None = None,
    ) -> Tensor:
        """Attend: x (B, T, D), normalised -> (B, T, D).

        Args:
            rope: tables of the T positions.
            mask: from `training_mask`, or a boolean tensor; None is causal.
            cache: earlier positions; extended in place.
            aux: filled with what diagnostics read, when given.
        """
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        context = self.context(x, q, k, v, mask, aux)
        if aux is not None:
            aux["q"], aux["k"], aux["v"] = q, k, v
            aux.setdefault("context", context)
        if self.context_scale != 1:
            context = context * self.context_scale
            if aux is not None:
                aux["context"] = aux["context"] * self.context_scale
        return self.wo(context.flatten(2))

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate: x (B, T, D) -> q (B, T, n_query_heads, d), k and v (B, T, K, d)."""
        q = self.wq(x).unflatten(-1, (self.n_query_heads, self.head_dim))
        k = self.wk(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        v = self.wv(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rope(q, rope), apply_rope(k, rope), v

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, aux: Aux | None
    ) -> Tensor:
        """Return the vectors (B, T, heads, width) that enter `wo`; each variant defines its own."""
        raise NotImplementedError

    def maps(self, x: Tensor, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Maps:
        """Return the explicit maps by name, (B, heads, T, S) each; the last one weights the values.

        For figures, probes and tests; gates and head norms act behind it.
        """
        return {"map": attention_weights(q, k, mask)}

    def logits(self, q: Tensor, k: Tensor) -> Maps:
        """Return q k / sqrt(d) of each map by its name, (B, heads, T, S) each; none is masked."""
        return {"map": attention_scores(q, k)}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return attend(q, k, v, mask, self.backend)

    def training_mask(
        self, documents: Documents | None, tokens: Tensor, dtype: torch.dtype
    ) -> Mask:
        """Return the mask that `forward` of any layer takes for a batch of tokens (B, T)."""
        kernel = self.kernel(tokens.device, dtype, documents is not None).value
        return training_mask(kernel, documents, tokens)

    def reset_parameters(self, init: Initializer) -> None:
        """Fill what a variant has besides matrices and norms, which the decoder fills."""

    def flops_per_token(self, seq_len: int, visible_keys: float | None = None) -> float:
        """Count training FLOPs per token: projections, q k and weights v.

        `visible_keys` is the mean number of keys that a query sees, by default (seq_len + 1) / 2.
        """
        matrices = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        width = self.head_dim + self.value_dim
        keys = (seq_len + 1) / 2 if visible_keys is None else visible_keys
        return 6 * (matrices + self.n_query_heads * width * keys)

    def new_cache(
        self, batch: int, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        shape = (batch, self.n_kv_heads, length, self.head_dim)
        return KVCache(shape, shape, dtype, device)

    def kv_cache_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Count the bytes of one position of one sequence in this cache."""
        cache = self.new_cache(1, 1, torch.float32, "meta")
        return (cache.k.numel() + cache.v.numel()) * bytes_per_value
