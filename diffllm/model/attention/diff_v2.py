"""Differential attention, second version (Ye, Dong, Sun, Wei; writeup of January 2026)."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from diffllm.core.errors import ConfigError
from diffllm.core.keys import key
from diffllm.core.registry import schema
from diffllm.model.attention.base import Attention, AttentionConfig, Aux, Maps
from diffllm.model.attention.masks import Mask
from diffllm.model.attention.ops import at_least_float32, attention_scores, attention_weights
from diffllm.model.config import ModelConfig
from diffllm.model.init import Initializer

FIXED_LAMBDA = 0.5
"""Default of `lambda_value`."""


class Pairing(Enum):
    """Rule that forms H pairs from 2H query heads.

    adjacent: pair i contains the heads 2i and 2i + 1, which use the same keys and values.
    halves: pair i contains the heads i and H + i. With several kv heads, they use different
        keys and values.
    """

    adjacent = "adjacent"
    halves = "halves"


class Lambda(Enum):
    """Formula of lambda, the factor of the second attention map.

    `w_lambda` is a learned matrix, and x is the input of the attention layer.

    sigmoid: sigmoid(w_lambda x), one value per token and pair of query heads.
    raw: w_lambda x, one value per token and pair of query heads.
    scalar: sigmoid of a learned parameter, one value per pair of query heads.
    fixed: the constant `DiffV2Config.lambda_value`.
    none: the constant 1.
    """

    sigmoid = "sigmoid"
    raw = "raw"
    scalar = "scalar"
    fixed = "fixed"
    none = "none"


@schema(group="attention", name="diff_v2", package="model.attention")
@dataclass
class DiffV2Config(AttentionConfig):
    """Settings of DIFF V2, by default with one lambda per token and pair of query heads."""

    pairing: Pairing = key(
        Pairing.adjacent,
        effect="numbers",
        help="Pairs of query heads: 2i and 2i+1, which share key and value, or i and i+H.",
    )
    lambda_form: Lambda = key(
        Lambda.sigmoid,
        effect="numbers",
        help="Formula of lambda: per token, with or without sigmoid; learned per head; "
        "constant; 1.",
    )
    lambda_value: float = key(
        FIXED_LAMBDA, effect="numbers", help="Constant lambda, only for lambda_form=fixed."
    )
    head_norm: bool = key(
        False,
        effect="numbers",
        help="Apply RMSNorm to each head as V1 does, without the factor of V1.",
    )

    def build(self, model: ModelConfig, layer_idx: int) -> "DiffV2Attention":
        return DiffV2Attention(model, self)

    def validate(self, model: ModelConfig) -> None:
        if self.lambda_value != FIXED_LAMBDA and self.lambda_form is not Lambda.fixed:
            raise ConfigError(
                f"model.attention.lambda_value={self.lambda_value} needs "
                f"model.attention.lambda_form=fixed, not {self.lambda_form.name}"
            )


class DiffV2Attention(Attention):
    """Differential attention V2: attn1 - lambda * attn2.

    attn1 and attn2 are the softmax attention outputs of the two query heads of a pair. By default,
    query heads 2i and 2i + 1 form a pair, and lambda = sigmoid(w_lambda x), with one value per
    token and pair. With H = model.n_heads, one kernel call with 2H query heads computes attn1 and
    attn2 of all H pairs.
    """

    def __init__(self, model: ModelConfig, cfg: DiffV2Config):
        super().__init__(
            model, n_query_heads=2 * model.n_heads, context_dim=model.n_heads * model.head_dim
        )
        self.cfg = cfg
        if cfg.pairing is Pairing.halves:
            self.maps_note = (
                "map 1 and map 2 weight different values, so their difference weights no values"
            )
        if cfg.lambda_form in (Lambda.sigmoid, Lambda.raw):
            self.w_lambda = nn.Linear(model.dim, model.n_heads, bias=False)
        if cfg.lambda_form is Lambda.scalar:
            self.lambda_logit = nn.Parameter(torch.empty(model.n_heads))
            self.fp32_parameters = ("lambda_logit",)
        if cfg.head_norm:
            self.head_norm = nn.RMSNorm(model.head_dim, model.norm_eps)

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, aux: Aux | None
    ) -> Tensor:
        heads = self.attend(q, k, v, mask)  # (B, T, 2H, d)
        attn1, attn2 = self.pair(heads, dim=2)
        lam = self.lambda_values(x)
        # lam is a float32 tensor of three dimensions, so the difference is computed in float32.
        context = attn1 - lam.unsqueeze(-1) * attn2
        context = context.to(x.dtype)
        if aux is not None:
            aux["context"] = context
            aux["lambda"] = lam
        if self.cfg.head_norm:
            return self.head_norm(context)
        return context

    def maps(self, x: Tensor, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Maps:
        weights = attention_weights(q, k, mask)  # (B, 2H, T, S)
        map1, map2 = self.pair(weights, dim=1)
        lam = self.lambda_values(x).transpose(1, 2).unsqueeze(-1)  # broadcastable to (B, H, T, 1)
        difference = map1 - lam * map2
        return {"map 1": map1, "map 2": map2, "difference": difference}

    def logits(self, q: Tensor, k: Tensor) -> Maps:
        logits = attention_scores(q, k)
        logits1, logits2 = self.pair(logits, dim=1)
        return {"map 1": logits1, "map 2": logits2}

    def pair(self, heads: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Split 2H heads along `dim` into the first heads and the second heads of all H pairs."""
        if self.cfg.pairing is Pairing.adjacent:
            pairs = heads.unflatten(dim, (-1, 2))
            first, second = pairs.unbind(dim + 1)
        else:
            first, second = heads.chunk(2, dim=dim)
        return first, second

    def lambda_values(self, x: Tensor) -> Tensor:
        """Compute lambda, the factor of the second attention map, from x (B, T, D).

        The result is float32 or float64, of shape (B, T, H). If lambda does not depend on x, the
        shape is (1, 1, H) for one lambda per pair, and (1, 1, 1) for a constant.
        """
        form = self.cfg.lambda_form
        if form is Lambda.fixed or form is Lambda.none:
            value = 1.0 if form is Lambda.none else self.cfg.lambda_value
            dtype = at_least_float32(x.dtype)
            return torch.full((1, 1, 1), value, dtype=dtype, device=x.device)
        logits = self.lambda_logit.view(1, 1, -1) if form is Lambda.scalar else self.w_lambda(x)
        logits = logits.to(at_least_float32(logits.dtype))
        if form is Lambda.raw:
            return logits
        return torch.sigmoid(logits)

    def reset_parameters(self, init: Initializer) -> None:
        if self.cfg.lambda_form is Lambda.scalar:
            init.constant_(self.lambda_logit, 0.0)
