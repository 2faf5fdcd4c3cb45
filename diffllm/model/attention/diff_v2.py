"""Differential attention, second version (Ye, Dong, Sun, Wei; writeup of January 2026)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffllm.model.attention.base import Attention, AttentionConfig, Shown
from diffllm.model.attention.ops import attend
from diffllm.model.config import ModelConfig
from diffllm.model.init import Initializer
from diffllm.registry import schema


@schema(group="attention", name="diff_v2", package="model.attention")
@dataclass
class DiffV2Config(AttentionConfig):
    """Nothing to configure."""

    def build(self, model: ModelConfig, layer_idx: int) -> "DiffV2Attention":
        return DiffV2Attention(model)


class DiffV2Attention(Attention):
    """context = attn1 - sigmoid(w_lambda x) * attn2, lambda per token and per head.

    Twice the query heads over the baseline's kv heads, in one kernel call. Heads 2i and 2i+1 are
    a pair; they lie in one GQA group, so they share key and value.
    """

    def __init__(self, model: ModelConfig):
        super().__init__(
            model,
            n_query_heads=2 * model.n_heads,
            context_dim=model.n_heads * model.head_dim,
        )
        self.w_lambda = nn.Linear(model.dim, model.n_heads, bias=False)

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, show: Shown | None
    ) -> Tensor:
        attn1, attn2 = attend(q, k, v, mask).unflatten(2, (-1, 2)).unbind(3)
        logits = self.w_lambda(x)
        lam = torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        if show is not None:
            show["lambda"] = lam
        return (attn1 - lam.unsqueeze(-1) * attn2).to(x.dtype)

    def reset_parameters(self, init: Initializer, std: float, out_std: float) -> None:
        super().reset_parameters(init, std, out_std)
        init.normal_(self.w_lambda.weight, std, truncate=3)
