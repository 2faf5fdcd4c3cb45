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
"""Candidates for a divisor of the solved width; the first that comes close enough is taken."""
TOLERANCE = Fraction(1, 200)
"""Largest difference of the totals, as a share of the target's."""


@dataclass
class Matched:
    """The result of `model.match_params_to`: total parameters and the widths that give them.

    The widths are those of `model.ffn_dim`, or with experts of `model.moe.expert_dim`.
    """

    target: str = MISSING
    target_params: int = MISSING
    target_ffn_dim: int = MISSING
    params: int = MISSING
    ffn_dim: int = MISSING
    key: str = "ffn_dim"
    """The width that was solved: "ffn_dim" or "moe.expert_dim"."""

    @property
    def difference_percent(self) -> float:
        """Excess of the total over the target's, in percent of the target's."""
        return 100 * (self.params - self.target_params) / self.target_params

    def numbers(self) -> dict[str, Any]:
        """Return all fields and `difference_percent`, for JSON."""
        return {**asdict(self), "difference_percent": self.difference_percent}

    def text(self) -> str:
        """Describe the match in one sentence."""
        return (
            f"{self.key} {self.ffn_dim:,} gives {self.params:,} parameters, "
            f"{self.difference_percent:+.3f}% against {self.target}'s {self.target_params:,} "
            f"at {self.key} {self.target_ffn_dim:,}"
        )


def match(
    model: ModelConfig, variant: str, target: str, target_attention: AttentionConfig
) -> Matched:
    """Solve the width with which `model` has as many parameters as with another attention.

    The width is that of the feed-forward layers, or of the experts where there are any. One that
    gives exactly the target's total stays; otherwise it is the nearest positive multiple of the
    largest of MODULI that comes within TOLERANCE.

    Raises ConfigError if the target cannot have this shape, or no width comes close enough.

    Args:
        model: a valid shape, its width the target's.
        variant, target: names of `model.attention` and `target_attention`, for messages.
    """
    key = f"model.match_params_to={target}"
    target_model = replace(model, attention=target_attention)
    try:
        target_model.validate()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    wanted, start = total_params(target_model), width_of(model)
    total, width = total_params(model), start
    name = "moe.expert_dim" if model.moe.n_experts else "ffn_dim"
    if total != wanted:
        a_step = Fraction(total_params(widened(model, 2 * width)) - total, width)
        exact = width + (wanted - total) / a_step
        for modulus in MODULI:
            width = max(1, round(exact / modulus)) * modulus
            total = total_params(widened(model, width))
            if abs(total - wanted) <= TOLERANCE * wanted:
                break
        else:
            raise ConfigError(
                f"{key}: attention={variant} cannot come within {float(TOLERANCE):.1%} of the "
                f"{wanted:,} parameters that {target} has at model.{name}={start}; the "
                f"closest total is {total:,}, at model.{name}={width}: "
                f"start from a larger model.{name}"
            )
    return Matched(target, wanted, start, total, width, name)


def width_of(model: ModelConfig) -> int:
    """Return the width that is solved: of the experts, or of the feed-forward layers."""
    return model.moe.expert_dim if model.moe.n_experts else model.ffn_dim


def widened(model: ModelConfig, width: int) -> ModelConfig:
    """Return the model with another width of its experts, or of its feed-forward layers."""
    if model.moe.n_experts:
        return replace(model, moe=replace(model.moe, expert_dim=width))
    return replace(model, ffn_dim=width)


def total_params(model: ModelConfig) -> int:
    """Count the parameters of the whole decoder, on one built without storage."""
    with torch.device("meta"):
        return sum(param.numel() for param in build_model(model).parameters())
