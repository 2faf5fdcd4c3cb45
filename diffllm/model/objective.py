"""The terms of the training objective: metric names, weights and divisors."""

from __future__ import annotations

from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from diffllm.model.config import ModelConfig


class Term(Enum):
    """A term of the objective; each member is (metric, weight_key, divisor).

    metric: name of the metric that is the weighted mean of the term over the global batch.
    weight_key: config key of the weight, below `model.`; None means weight 1.
    divisor: count by which a sum over the global batch becomes a mean. "targets" are targets that
        the loss does not ignore, "tokens" are positions that are not padding.
    """

    cross_entropy = ("train/loss", None, "targets")
    z_loss = ("train/z_loss", "z_loss", "targets")
    balance_loss = ("train/balance_loss", "moe.balance_loss", "tokens")
    router_z_loss = ("train/router_z_loss", "moe.router_z_loss", "tokens")

    def __init__(self, metric: str, weight_key: str | None, divisor: str):
        self.metric = metric
        self.weight_key = weight_key
        self.divisor = divisor

    def weight(self, model: ModelConfig) -> float:
        if self.weight_key is None:
            return 1.0
        weight: float = attrgetter(self.weight_key)(model)
        return weight


Losses = dict[Term, Tensor]
"""Terms without their weights, each summed over tokens: scalars, float32 or wider."""
