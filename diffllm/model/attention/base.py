"""Base classes of attention variants: the config, the attention module and the KV cache.

Each variant has a file in this folder. The file contains a registered config class and a module
class, usually a subclass of `Attention` that overrides `context`.

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

from diffllm.core.keys import key
from diffllm.model.attention.kernels import Resolved, training_mask
from diffllm.model.attention.masks import Documents, Mask, WholeMask
from diffllm.model.attention.ops import Backend, attend, attention_scores, attention_weights
from diffllm.model.attention.slices import degrees
from diffllm.model.init import Initializer
from diffllm.model.rope import Rope, apply_rope

if TYPE_CHECKING:
    from diffllm.model.config import ModelConfig

Aux = dict[str, Tensor]
"""Tensors of a layer for diagnostics, by name: projected "q", "k" and "v", "context"
(B, T, heads, width), "lambda", "gate"."""

Maps = dict[str, Tensor]
"""Explicit maps by name, (B, heads, T, S) each; the last map weights the values."""


@dataclass
class AttentionConfig:
    """Base class of the configs of all attention variants."""

    backend: Backend = key(
        Backend.sdpa,
        effect="speed",
        help="Kernel of training; decoding uses SDPA, or explicit maps with `reference`.",
    )
    context_scale: float = key(
        1.0,
        above=0,
        effect="numbers",
        help="Fixed factor on the input of `wo`: a control for the magnitude of attention's "
        "output.",
    )

    def build(self, model: ModelConfig, layer_idx: int) -> Attention:
        """Build the attention module of decoder layer `layer_idx`, counted from 0."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method build(model, layer_idx); define this method to "
            "return an attention module"
        )

    def validate(self, model: ModelConfig) -> None:
        """Raise ConfigError if this attention variant does not support the shape of `model`."""

    def resolve(self, model: ModelConfig, device: torch.device) -> Resolved:
        """Decide the settings that depend on `device`; see the fields of `Resolved`."""
        return Resolved(self, device, model.head_dim)


class KVCache:
    """Preallocated keys and values of one layer, for decoding.

    The tensors `k` and `v` have shape (B, heads, S_max, width). S_max is the capacity in tokens.
    """

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
        """Used positions of the longest row."""
        self.lengths: Tensor | None = None
        """Used positions of each row, (B,) int64; None if all rows are equally long."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, T, heads, width) to the cache; return all cached keys and values.

        Both results have shape (B, S, heads, width). S is the length of the longest sequence,
        including the new tokens. Raises ValueError if S would exceed S_max, or if T > 1 and the
        cached sequences differ in length. The cache is unchanged after an error.
        """
        start = self.length
        end = start + k.shape[1]
        # Check before any change, so that the cache is unchanged after an error.
        if end > self.k.shape[2]:
            raise ValueError(f"KV cache of {self.k.shape[2]} positions is full: {end} needed")
        if self.lengths is not None and k.shape[1] > 1:
            raise ValueError(
                f"{k.shape[1]} positions appended to rows of different lengths: append 1 at a time"
            )
        self.length = end
        if self.lengths is None:
            self.k[:, :, start:end] = k.transpose(1, 2)
            self.v[:, :, start:end] = v.transpose(1, 2)
        else:
            # Each row gets its new token at its own end.
            rows = torch.arange(len(self.lengths), device=self.k.device)
            self.k[rows, :, self.lengths] = k[:, 0].to(self.k.dtype)
            self.v[rows, :, self.lengths] = v[:, 0].to(self.v.dtype)
            self.lengths = self.lengths + 1
        cached_k = self.k[:, :, :end]
        cached_v = self.v[:, :, :end]
        return cached_k.transpose(1, 2), cached_v.transpose(1, 2)

    def truncate(self, lengths: list[int]) -> None:
        self.length = max(lengths)
        # Equally long rows need no mask, and allow several tokens per call.
        are_equal = len(set(lengths)) == 1
        if are_equal:
            self.lengths = None
        else:
            self.lengths = torch.tensor(lengths, device=self.k.device)

    def copies(self, count: int, room: int) -> KVCache:
        """Return a new cache with `count` copies of the cached sequence; the cache must have B = 1.

        Each copy has free space for `room` more positions.
        """
        padding = (0, 0, 0, room)
        used_k = self.k[:, :, : self.length]
        used_v = self.v[:, :, : self.length]
        # `expand` makes views, so `pad` makes the only copies.
        expanded_k = used_k.expand(count, -1, -1, -1)
        expanded_v = used_v.expand(count, -1, -1, -1)
        copies = copy.copy(self)
        copies.k = F.pad(expanded_k, padding)
        copies.v = F.pad(expanded_v, padding)
        return copies

    def keep(self, rows: list[int]) -> None:
        self.k = self.k[rows]
        self.v = self.v[rows]
        if self.lengths is not None:
            lengths = self.lengths[rows].tolist()
            self.truncate(lengths)


class Attention(nn.Module):
    """Base class of attention modules: applies projections, RoPE and the KV cache.

    fp32_parameters: names of the parameters that stay in float32 under mixed precision.
    maps_note: remark that figures of the attention maps show; "" for no remark.
    sliceable: whether all kernel calls go through `attend`, as context parallelism requires.
    """

    fp32_parameters: tuple[str, ...] = ()
    maps_note: str = ""
    sliceable: bool = True

    def __init__(
        self, model: ModelConfig, n_query_heads: int | None = None, context_dim: int | None = None
    ):
        """Create the projections for `n_query_heads` heads; None means model.n_heads.

        `context_dim` is the input width of `wo`; None means n_query_heads * head_dim.
        """
        super().__init__()
        self.n_heads = model.n_heads
        self.n_kv_heads = model.n_kv_heads
        self.head_dim = model.head_dim
        self.value_dim = model.head_dim
        self.n_query_heads = n_query_heads or model.n_heads
        self.backend = model.attention.backend
        self.context_scale = model.attention.context_scale
        self.resolve = partial(model.attention.resolve, model)
        q_dim = self.n_query_heads * self.head_dim
        kv_dim = self.n_kv_heads * self.head_dim
        context_dim = context_dim or q_dim
        self.wq = nn.Linear(model.dim, q_dim, bias=False)
        self.wk = nn.Linear(model.dim, kv_dim, bias=False)
        self.wv = nn.Linear(model.dim, kv_dim, bias=False)
        self.wo = nn.Linear(context_dim, model.dim, bias=False)
        if model.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, model.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, model.norm_eps)
        self.qk_norm = model.qk_norm

    def statistics(self, aux: Aux) -> dict[str, Tensor]:
        """Return metrics that only this variant has: float32 scalars by metric name.

        Each name must be registered with `diffllm.metrics.table.add_metric`. `aux` contains the
        diagnostic tensors of this layer by name, such as "lambda".
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
        """Apply attention to the layer's normalized input x (B, T, D); return (B, T, D).

        Args:
            rope: cos and sin tables of the T positions.
            mask: result of `Attention.training_mask`, or a boolean tensor; None means causal.
            cache: keys and values of earlier positions; the call appends the keys and values of x.
            aux: dict to which the call adds diagnostic tensors by name, such as "q".
        """
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        context = self.context(x, q, k, v, mask, aux)
        if aux is not None:
            aux["q"] = q
            aux["k"] = k
            aux["v"] = v
            # DIFF V1 and V2 have set the context before their head norm, V1 also before the factor
            # 1 - lambda_init.
            aux.setdefault("context", context)
        if self.context_scale != 1:
            context = context * self.context_scale
            if aux is not None:
                aux["context"] = aux["context"] * self.context_scale
        return self.wo(context.flatten(2))

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values from x (B, T, D), and rotate queries and keys by RoPE.

        Returns q (B, T, n_query_heads, d), and k and v (B, T, n_kv_heads, d).
        """
        q = self.wq(x).unflatten(-1, (self.n_query_heads, self.head_dim))
        k = self.wk(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        v = self.wv(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        if self.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return apply_rope(q, rope), apply_rope(k, rope), v

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, aux: Aux | None
    ) -> Tensor:
        """Compute the outputs of all heads, (B, T, heads, width), before the projection `wo`.

        Variants override this method; heads * width must be the input width of `wo`. `x` is the
        input of `forward`. mask=None means a causal mask. `aux` is a dict for diagnostic tensors.
        """
        raise NotImplementedError

    def maps(self, x: Tensor, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Maps:
        """Compute attention maps (B, heads, T, S) by name, for figures and diagnostics.

        The base class returns one softmax map, named "map". Differential variants return "map 1",
        "map 2" and "difference", in this order. Maps do not include gates and head norms. `mask` is
        a boolean tensor; None means a causal mask.
        """
        return {"map": attention_weights(q, k, mask)}

    def logits(self, q: Tensor, k: Tensor) -> Maps:
        """Return the unmasked logits q k / sqrt(d) of each softmax map: (B, heads, T, S) each.

        The keys of the dict are the names of these maps in the result of `maps`, such as "map 1".
        """
        return {"map": attention_scores(q, k)}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return attend(q, k, v, mask, self.backend)

    def training_mask(
        self, documents: Documents | None, tokens: Tensor, dtype: torch.dtype
    ) -> WholeMask:
        """Build the attention mask that all layers use for a batch of tokens (B, T).

        `dtype` is the dtype of queries and keys. If `documents` is given, queries see only keys of
        the same document.
        """
        kernel = self.resolve(tokens.device).kernel(dtype, documents=documents is not None)
        return training_mask(kernel.value, documents, tokens)

    def reset_parameters(self, init: Initializer) -> None:
        """Initialise all buffers, and all parameters except matrices and norm weights.

        `diffllm.model.transformer.initialise` initialises the matrices and norm weights.
        """

    def flops_per_token(self, seq_len: int, visible_keys: float | None = None) -> float:
        """Count training FLOPs per token: weight matrices, attention logits and weighted values.

        `visible_keys` is the mean number of keys that a query sees; None means (seq_len + 1) / 2.
        """
        matrices = sum(param.numel() for param in self.parameters() if param.ndim == 2)
        width = self.head_dim + self.value_dim
        if visible_keys is None:
            visible_keys = (seq_len + 1) / 2
        # 2 FLOPs per multiplication and addition, once forward and twice backward.
        return 6 * (matrices + self.n_query_heads * width * visible_keys)

    def context_degrees(self) -> list[int]:
        """Return the numbers of ranks that can share a sequence (parallel.context)."""
        # A variant may have fewer value heads than `n_kv_heads`, as V1 does; its cache shows them.
        cache = self.new_cache(1, 1, torch.float32, "meta")
        n_keys = cache.k.shape[1]
        n_values = cache.v.shape[1]
        return degrees(self.n_query_heads, n_keys, n_values)

    def new_cache(
        self, batch: int, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        shape = (batch, self.n_kv_heads, length, self.head_dim)
        return KVCache(shape, shape, dtype, device)

    def kv_cache_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Return the size in bytes of one token in the KV cache of this layer."""
        cache = self.new_cache(1, 1, torch.float32, "meta")
        return (cache.k.numel() + cache.v.numel()) * bytes_per_value
