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
        own, wanted = getattr(self, self.by), getattr(self, f"target_{self.by}")
        return 100 * (own - wanted) / wanted

    def numbers(self) -> dict[str, Any]:
        return {**asdict(self), "difference_percent": self.difference_percent}

    def text(self) -> str:
        own, wanted = getattr(self, self.by), getattr(self, f"target_{self.by}")
        return (
            f"{self.key} {self.ffn_dim:,} gives {own:,.0f} {UNITS[self.by]}, "
            f"{self.difference_percent:+.3f}% against {self.target}'s {wanted:,.0f} "
            f"at {self.key} {self.target_ffn_dim:,}"
        )


def match(
    model: ModelConfig,
    target: str,
    target_attention: AttentionConfig,
    by: str = "params",
    visible_keys: float | None = None,
) -> Matched:
    """Solve the feed-forward width at which `model` costs as much as a target model.

    The target model is `model` with the attention `target_attention`. If the two models cost the
    same, keep the width. Otherwise, compute the width with equal costs, and round this width to a
    multiple of 64, 32, 16 or 8: the first of these at which the costs differ by at most TOLERANCE.
    Raises ConfigError if the costs differ by more than TOLERANCE at all four rounded widths.

    Args:
        target: name of the target variant.
        by: cost to match: "params" (parameters) or "flops" (training FLOPs per token).
        visible_keys: mean number of keys that a query sees, for FLOPs; None without document masks.
    """
    key, unit = f"model.match_{by}_to={target}", UNITS[by]
    target_model = replace(model, attention=target_attention)
    try:
        target_model.validate()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    of = partial(totals, visible_keys=visible_keys)
    goal, own = of(target_model), of(model)
    wanted = goal[by]
    name = "moe.expert_dim" if model.moe.n_experts else "ffn_dim"
    start = width = model.moe.expert_dim if model.moe.n_experts else model.ffn_dim
    if own[by] != wanted:
        a_step = Fraction(of(widened(model, 2 * width))[by] - own[by]) / width
        exact = width + Fraction(wanted - own[by]) / a_step
        for modulus in MODULI:
            width = max(1, round(exact / modulus)) * modulus
            own = of(widened(model, width))
            if abs(own[by] - wanted) <= TOLERANCE * Fraction(wanted):
                break
        else:
            raise ConfigError(
                f"{key}: no model.{name} gives {wanted:,.0f} {unit} with an error of at most "
                f"{float(TOLERANCE):.1%}. The closest value, model.{name}={width}, gives "
                f"{own[by]:,.0f}; choose a config with a larger model.{name}"
            )
    return Matched(
        target=target, target_params=round(goal["params"]), target_ffn_dim=start,
        params=round(own["params"]), ffn_dim=width, key=name,
        by=by, target_flops=goal["flops"], flops=own["flops"],
    )  # fmt: skip


def widened(model: ModelConfig, width: int) -> ModelConfig:
    if model.moe.n_experts:
        return replace(model, moe=replace(model.moe, expert_dim=width))
    return replace(model, ffn_dim=width)


def totals(model: ModelConfig, visible_keys: float | None = None) -> dict[str, float]:
    built = without_storage(model)
    params = sum(param.numel() for param in built.parameters())
    return {"params": params, "flops": built.flops_per_token(visible_keys)}
