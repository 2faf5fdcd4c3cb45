"""Solve the feed-forward width that gives two variants equal parameters or equal training FLOPs."""

from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from omegaconf import MISSING

from diffllm.core.errors import ConfigError
from diffllm.model import ModelConfig, without_storage
from diffllm.model.attention.base import AttentionConfig

MODULI = (64, 32, 16, 8)
"""Candidate divisors of the solved width; the first divisor that meets TOLERANCE is used."""
TOLERANCE = Fraction(1, 200)
"""Largest allowed difference of the totals, as a share of the target's total."""
UNITS = {"params": "parameters", "flops": "FLOPs per token"}


@dataclass
class Matched:
    """Feed-forward widths and costs of a model and of its target model.

    Fields with the prefix `target_` belong to the target model, and `target` is the name of its
    attention variant. `ffn_dim` and `target_ffn_dim` are values of the model key `key`: "ffn_dim"
    or "moe.expert_dim". `by` is the matched cost: "params" or "flops".
    """

    target: str = MISSING
    target_params: int = MISSING
    target_ffn_dim: int = MISSING
    params: int = MISSING
    ffn_dim: int = MISSING
    key: str = "ffn_dim"
    by: str = "params"
    target_flops: float = 0.0
    flops: float = 0.0
    """Training FLOPs per token."""

    @property
    def difference_percent(self) -> float:
        cost = getattr(self, self.by)
        target_cost = getattr(self, f"target_{self.by}")
        return 100 * (cost - target_cost) / target_cost

    def numbers(self) -> dict[str, Any]:
        return {**asdict(self), "difference_percent": self.difference_percent}

    def text(self) -> str:
        cost = getattr(self, self.by)
        target_cost = getattr(self, f"target_{self.by}")
        return (
            f"{self.key} {self.ffn_dim:,} gives {cost:,.0f} {UNITS[self.by]}, "
            f"{self.difference_percent:+.3f}% against {self.target}'s {target_cost:,.0f} "
            f"at {self.key} {self.target_ffn_dim:,}"
        )


def match(
    model: ModelConfig,
    target: str,
    target_attention: AttentionConfig,
    cost: str = "params",
    visible_keys: float | None = None,
) -> Matched:
    """Solve the feed-forward width at which `model` costs as much as a target model.

    The target model is `model` with the attention `target_attention`. If the two models cost the
    same, keep the width. Otherwise, compute the width with equal costs, and round this width to a
    multiple of 64, 32, 16 or 8: the first of these at which the costs differ by at most TOLERANCE.
    Raises ConfigError if the costs differ by more than TOLERANCE at all four rounded widths.

    Args:
        target: name of the target variant.
        cost: "params" (parameters) or "flops" (training FLOPs per token).
        visible_keys: mean number of keys that a query sees, for FLOPs; None without document masks.
    """
    key = f"model.match_{cost}_to={target}"
    target_model = replace(model, attention=target_attention)
    try:
        target_model.validate()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    costs_of = partial(totals, visible_keys=visible_keys)
    target_costs = costs_of(target_model)
    costs = costs_of(model)
    target_cost = target_costs[cost]
    name = "moe.expert_dim" if model.moe.n_experts else "ffn_dim"
    target_width = model.moe.expert_dim if model.moe.n_experts else model.ffn_dim
    width = target_width
    if costs[cost] != target_cost:
        # Both costs are linear in the width, so two widths determine the slope. Fractions are
        # exact, so that the rounded width does not depend on rounding errors.
        doubled_costs = costs_of(widened(model, 2 * width))
        slope = Fraction(doubled_costs[cost] - costs[cost]) / width
        exact = width + Fraction(target_cost - costs[cost]) / slope
        for modulus in MODULI:
            width = max(1, round(exact / modulus)) * modulus
            costs = costs_of(widened(model, width))
            if abs(costs[cost] - target_cost) <= TOLERANCE * Fraction(target_cost):
                break
        else:
            raise ConfigError(
                f"{key}: no model.{name} gives {target_cost:,.0f} {UNITS[cost]} with an error of "
                f"at most {float(TOLERANCE):.1%}. The closest value, model.{name}={width}, gives "
                f"{costs[cost]:,.0f}; choose a config with a larger model.{name}"
            )
    return Matched(
        target=target,
        target_params=round(target_costs["params"]),
        target_ffn_dim=target_width,
        params=round(costs["params"]),
        ffn_dim=width,
        key=name,
        by=cost,
        target_flops=target_costs["flops"],
        flops=costs["flops"],
    )


def widened(model: ModelConfig, width: int) -> ModelConfig:
    if model.moe.n_experts:
        return replace(model, moe=replace(model.moe, expert_dim=width))
    return replace(model, ffn_dim=width)


def totals(model: ModelConfig, visible_keys: float | None = None) -> dict[str, float]:
    built = without_storage(model)
    params = sum(param.numel() for param in built.parameters())
    return {"params": params, "flops": built.flops_per_token(visible_keys)}
