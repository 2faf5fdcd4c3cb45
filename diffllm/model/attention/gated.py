"""Gated attention (Qiu et al., arXiv 2505.06708)."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from diffllm.core.keys import key
from diffllm.core.registry import schema
from diffllm.model.attention.base import Attention, AttentionConfig, Aux
from diffllm.model.attention.masks import Mask
from diffllm.model.config import ModelConfig


class Gate(Enum):
    """Number of gate values per token.

    elementwise: one value per channel of each head.
    headwise: one value per head.
    """

    elementwise = "elementwise"
    headwise = "headwise"


class GateInit(Enum):
    """Mean of the gate at initial values, where w_gate x is near 0.

    half: the gate is sigmoid(w_gate x), as in the paper. one: the gate is 2 sigmoid(w_gate x), so
    that gated attention starts with the context of standard attention.
    """

    half = "half"
    one = "one"


@schema(group="attention", name="gated", package="model.attention")
@dataclass
class GatedConfig(AttentionConfig):
    """Settings of gated attention (arXiv 2505.06708)."""

    gate: Gate = key(
        Gate.elementwise,
        effect="numbers",
        help="Granularity of the gate: one value per channel, or one value per head.",
    )

    init: GateInit = key(
        GateInit.half,
        effect="numbers",
        help="Mean of the gate at initial values; with `one`, the gate is multiplied by 2.",
    )

    def build(self, model: ModelConfig, layer_idx: int) -> "GatedAttention":
        return GatedAttention(model, self)


class GatedAttention(Attention):
    """Softmax attention times a sigmoid gate: sigmoid(w_gate x) * softmax(q k / sqrt(d)) v.

    `x` is also the input from which queries, keys and values are computed.
    """

    def __init__(self, model: ModelConfig, cfg: GatedConfig):
        super().__init__(model)
        self.gate_width = self.head_dim if cfg.gate is Gate.elementwise else 1
        self.gate_scale = 2.0 if cfg.init is GateInit.one else 1.0
        gates_per_token = self.n_heads * self.gate_width
        self.w_gate = nn.Linear(model.dim, gates_per_token, bias=False)

    def context(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, aux: Aux | None
    ) -> Tensor:
        gate = torch.sigmoid(self.w_gate(x))
        gate = gate.unflatten(-1, (self.n_heads, self.gate_width))
        if self.gate_scale != 1:
            gate = gate * self.gate_scale
        if aux is not None:
            aux["gate"] = gate
        return gate * self.attend(q, k, v, mask)
