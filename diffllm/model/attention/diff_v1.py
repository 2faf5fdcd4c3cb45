"""Differential attention, first version (Ye et al., ICLR 2025, arXiv 2410.05258).

Shapes: H query heads and K key heads of width d, as in standard attention. They form H/2
differential heads. There are K/2 value heads of width 2d.
"""

import math
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from diffllm.core.errors import ConfigError
from diffllm.core.keys import key
from diffllm.core.registry import schema
from diffllm.model.attention.base import Attention, AttentionConfig, Aux, KVCache, Maps
from diffllm.model.attention.kernels import Kernel, Resolved
from diffllm.model.attention.masks import Mask, Sliced
from diffllm.model.attention.ops import (
    Backend,
    at_least_float32,
    attention_scores,
    attention_weights,
    weighted,
)
from diffllm.model.auto_setting import ASKED, AutoSetting
from diffllm.model.config import ModelConfig
from diffllm.model.init import Initializer
from diffllm.model.rope import Rope

FAST_WIDTH = 128
"""Largest width of values at which many GPU kernels are fast; not measured."""


class Values(Enum):
    """Shape in which the attention kernel gets the values of width 2d.

    auto: split on a GPU if 2d exceeds 128, else wide.
    wide: one value head of width 2d per pair of key heads.
    split: two value heads of width d per pair of key heads. The kernel computes each map twice.
    """

    auto = "auto"
    wide = "wide"
    split = "split"


def values_layout(values: Values, head_dim: int, device: torch.device) -> AutoSetting:
    """Return the layout of the values, and the reason for it.

    If `values` is `auto`, choose wide or split from `head_dim` and `device`; else return `values`.
    """
    if values is not Values.auto:
        return AutoSetting(values, ASKED)
    if device.type == "cuda" and 2 * head_dim > FAST_WIDTH:
        return AutoSetting(
            Values.split, f"few kernels are fast at width {2 * head_dim}; not measured"
        )
    return AutoSetting(Values.wide, f"2 x {head_dim} on the {device.type}")


@schema(group="attention", name="diff_v1", package="model.attention")
@dataclass
class DiffV1Config(AttentionConfig):
    """Settings of DIFF V1 (arXiv 2410.05258), with one lambda per layer and one norm per head."""

    head_norm: bool = key(
        True,
        effect="numbers",
        help="Apply RMSNorm to the 2d channels of each head; false keeps the factor 1 - "
        "lambda_init.",
    )
    head_norm_eps: float = key(
        1e-5,
        above=0,
        effect="numbers",
        help="Added to the mean square inside the norm of `head_norm`.",
    )
    lambda_init: float | None = key(
        None,
        effect="numbers",
        help="Constant for all layers; null: 0.8 - 0.6 exp(-0.3 l) in layer l.",
    )
    clamp: bool = key(
        False,
        effect="numbers",
        help="Clamp the map at 0 and renormalise; computes explicit maps, so only for small "
        "models.",
    )
    values: Values = key(
        Values.auto,
        effect="speed",
        help="Layout of the values in the kernel call; does not change the result.",
    )

    def build(self, model: ModelConfig, layer_idx: int) -> "DiffV1Attention":
        return DiffV1Attention(model, self, layer_idx)

    def validate(self, model: ModelConfig) -> None:
        for name, heads in (("n_heads", model.n_heads), ("n_kv_heads", model.n_kv_heads)):
            if heads % 2:
                raise ConfigError(
                    f"model.{name}={heads} must be even, because attention=diff_v1 pairs heads"
                )
        if self.clamp and self.backend in (Backend.flash, Backend.flex):
            raise ConfigError(
                f"model.attention.backend={self.backend.name} does not support "
                "model.attention.clamp=true; choose backend sdpa or reference"
            )
        if self.clamp and self.values is Values.split:
            raise ConfigError(
                "model.attention.values=split has no effect with model.attention.clamp=true: "
                "remove values=split"
            )
        if self.lambda_init == 1:
            raise ConfigError(
                "model.attention.lambda_init=1 makes all attention outputs zero, because they are "
                "multiplied by 1 - lambda_init: choose another value"
            )

    def resolve(self, model: ModelConfig, device: torch.device) -> Resolved:
        layout = values_layout(self.values, model.head_dim, device)
        width = model.head_dim
        if layout.value is Values.wide:
            width = 2 * model.head_dim
        if self.clamp:
            # Explicit maps have no layout to choose; `validate` refuses values=split with clamp.
            kernel = AutoSetting(Kernel.explicit, "no fused kernel clamps maps")
            return Resolved(self, device, width, explicit_mask=True, only_kernel=kernel)
        return Resolved(self, device, width, settings={"values": layout})


class DiffV1Attention(Attention):
    """Differential attention V1: RMSNorm(attn1 - lambda * attn2) * (1 - lambda_init).

    The query heads q[2i] and q[2i+1] form differential head i. The key heads k[2j] and k[2j+1] and
    the value head v[j], of width 2d, serve the H/K differential heads i with i // (H/K) = j:
    attn1 = softmax(q[2i] k[2j] / sqrt(d)) v[j], attn2 = softmax(q[2i+1] k[2j+1] / sqrt(d)) v[j].
    RMSNorm normalizes each differential head. The buffer `lambda_init` is constant.
    """

    fp32_parameters = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    lambda_init: Tensor

    def __init__(self, model: ModelConfig, cfg: DiffV1Config, layer_idx: int):
        super().__init__(model)
        self.value_dim = 2 * self.head_dim
        for name in self.fp32_parameters:
            vector = nn.Parameter(torch.empty(self.head_dim))
            self.register_parameter(name, vector)
        if cfg.head_norm:
            self.head_norm = nn.RMSNorm(self.value_dim, cfg.head_norm_eps)
        self.cfg = cfg
        self.layer_idx = layer_idx
        self.sliceable = not cfg.clamp
        self.maps_note = "difference clamped at 0 and renormalised" if cfg.clamp else ""
        # A tensor, because different floats would compile one graph per layer.
        self.register_buffer("lambda_init", torch.empty(()), persistent=False)

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values from x (B, T, D), and rotate queries and keys by RoPE.

        Returns q (B, T, H, d), k (B, T, K, d) and v (B, T, K/2, 2d). The heads of q and k are
        reordered: first heads 0, 2, 4, ... (for map 1), then heads 1, 3, 5, ... (for map 2).
        """
        q, k, v = super().project(x, rope)
        # All heads of map 1 precede those of map 2, so that one kernel call computes both maps.
        value_pairs = v.unflatten(2, (-1, 2))  # (B, T, K/2, 2, d)
        v = value_pairs.flatten(3)
        return even_heads_first(q), even_heads_first(k), v

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, aux: Aux | None
    ) -> Tensor:
        lam = self.lambda_value()
        if self.cfg.clamp:
            assert mask is None or isinstance(mask, Tensor)
            # The clamp needs the map itself, which no fused kernel returns.
            difference = self.maps(x, q, k, mask)["difference"]
            context = weighted(difference, v).to(x.dtype)
        else:
            heads = self.attend(q, k, v, mask)  # (B, T, H, 2d)
            attn1, attn2 = heads.chunk(2, dim=2)
            context = attn1 - lam * attn2
            context = context.to(x.dtype)
        if aux is not None:
            aux["context"] = context
            aux["lambda"] = lam
        normed = self.head_norm(context) if self.cfg.head_norm else context
        scaled = normed * (1 - self.lambda_init)
        return scaled.to(x.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if isinstance(mask, Sliced):
            # Exchange queries and keys once for both halves.
            kernel = partial(self.attend, mask=mask.mask)
            return mask.slices.around(kernel, q, k, v)
        layout = self.resolve(q.device).settings["values"].value
        # One query reads wide values from the cache; halves would copy the cache.
        if layout is Values.wide or q.shape[1] == 1:
            return super().attend(q, k, v, mask)
        low_v, high_v = v.chunk(2, -1)
        low = super().attend(q, k, low_v, mask)
        high = super().attend(q, k, high_v, mask)
        return torch.cat((low, high), dim=-1)

    def maps(self, x: Tensor, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Maps:
        weights = attention_weights(q, k, mask)  # (B, H, T, S)
        map1, map2 = weights.chunk(2, dim=1)
        difference = map1 - self.lambda_value() * map2
        if self.cfg.clamp:
            difference = clamped(difference)
        return {"map 1": map1, "map 2": map2, "difference": difference}

    def logits(self, q: Tensor, k: Tensor) -> Maps:
        logits = attention_scores(q, k)
        logits1, logits2 = logits.chunk(2, dim=1)
        return {"map 1": logits1, "map 2": logits2}

    def new_cache(
        self, batch: int, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        keys = (batch, self.n_kv_heads, length, self.head_dim)
        values = (batch, self.n_kv_heads // 2, length, self.value_dim)
        return KVCache(keys, values, dtype, device)

    def lambda_value(self) -> Tensor:
        """Compute lambda of the layer, a scalar in float32 or float64.

        lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init.
        """
        vectors = []
        for name in self.fp32_parameters:
            vector: Tensor = getattr(self, name)
            vectors.append(vector.to(at_least_float32(vector.dtype)))
        q1, k1, q2, k2 = vectors
        exp1 = torch.exp((q1 * k1).sum())
        exp2 = torch.exp((q2 * k2).sum())
        return exp1 - exp2 + self.lambda_init

    def reset_parameters(self, init: Initializer) -> None:
        for name in self.fp32_parameters:
            init.normal_(getattr(self, name), 0.1)
        lambda_init = self.cfg.lambda_init
        if lambda_init is None:
            # Section 2.1 of the paper, with layers counted from 0.
            lambda_init = 0.8 - 0.6 * math.exp(-0.3 * self.layer_idx)
        self.lambda_init.fill_(lambda_init)


def clamped(weights: Tensor) -> Tensor:
    """Clamp negative weights (..., T, S) to 0, and scale the weights of each query to a sum of 1.

    If a query has no positive weight, all its weights become 0.
    """
    positive = weights.clamp_min(0)
    total = positive.sum(-1, keepdim=True)
    return positive / torch.where(total > 0, total, 1)


def even_heads_first(heads: Tensor) -> Tensor:
    pairs = heads.unflatten(2, (-1, 2))  # (B, T, pairs, 2, d)
    even_and_odd = pairs.transpose(2, 3)
    return even_and_odd.flatten(2, 3)
