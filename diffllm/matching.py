"""Equal parameters for variants of unequal size: the feed-forward width makes up the difference."""

from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from omegaconf import MISSING

from diffllm.errors import ConfigError
from diffllm.model import ModelConfig, build_model
from diffllm.model.attention.base import AttentionConfig

MODULI = (64, 32, 16, 8)
"""What a solved width is a multiple of; the first that comes close enough."""
TOLERANCE = Fraction(1, 200)
"""Largest difference of the totals, as a share of the target's."""


@dataclass
class Matched:
    """What `model.match_params_to` found: total parameters and the widths that give them."""

    target: str = MISSING
    target_params: int = MISSING
    target_ffn_dim: int = MISSING
    params: int = MISSING
    ffn_dim: int = MISSING

    @property
    def difference_percent(self) -> float:
        """How far the total is over the target's."""
        return 100 * (self.params - self.target_params) / self.target_params

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "difference_percent": self.difference_percent}

    def text(self) -> str:
        """For people."""
        return (
            f"ffn_dim {self.ffn_dim:,} gives {self.params:,} parameters, "
            f"{self.difference_percent:+.3f}% against {self.target}'s {self.target_params:,} "
            f"at ffn_dim {self.target_ffn_dim:,}"
        )


def match(
    model: ModelConfig, variant: str, target: str, target_attention: AttentionConfig
) -> Matched:
    """The ffn_dim with which `model` has the parameters of the same shape with another attention.

    A width that gives exactly the target's total stays. Otherwise it is the nearest positive
    multiple of the largest of MODULI that comes within TOLERANCE.

    Args:
        model: a valid shape, its ffn_dim the target's.
        variant: name of `model.attention`, for messages.
        target: name of `target_attention`.

    Raises:
        ConfigError: the target cannot have this shape, or no width comes close enough.
    """
    key = f"model.match_params_to={target}"
    target_model = replace(model, attention=target_attention)
    try:
        target_model.validate()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    wanted, width = total_params(target_model), model.ffn_dim
    total = total_params(model)
    if total != wanted:
        a_step = Fraction(total_params(replace(model, ffn_dim=2 * width)) - total, width)
        exact = width + (wanted - total) / a_step
        for modulus in MODULI:
            width = max(1, round(exact / modulus)) * modulus
            total = total_params(replace(model, ffn_dim=width))
            if abs(total - wanted) <= TOLERANCE * wanted:
                break
        else:
            raise ConfigError(
                f"{key}: attention={variant} cannot come within {float(TOLERANCE):.1%} of the "
                f"{wanted:,} parameters that {target} has at model.ffn_dim={model.ffn_dim}; the "
                f"closest total is {total:,}, at model.ffn_dim={width}: "
                "start from a larger model.ffn_dim"
            )
    return Matched(target, wanted, model.ffn_dim, total, width)


def total_params(model: ModelConfig) -> int:
    """Parameters of the whole decoder, counted on one built without storage."""
    with torch.device("meta"):
        return sum(param.numel() for param in build_model(model).parameters())
