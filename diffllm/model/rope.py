"""Rotary position embedding in the rotate-half layout (Su et al., arXiv 2104.09864).

Shapes: B batch, T tokens, H heads, d head_dim.
"""

import math
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from diffllm.core.errors import ConfigError
from diffllm.core.keys import declaration, key

Rope = tuple[Tensor, Tensor]  # cos and sin, each (T, 1, d), or (B, T, 1, d), float32


class RopeScaling(Enum):
    """Scaling of RoPE frequencies for contexts longer than the original training context.

    none: no scaling.
    linear: divide all frequencies by `factor` (Chen et al., arXiv 2306.15595).
    llama3: divide low frequencies by `factor`, keep high ones, interpolate in between (Llama 3.1).
    yarn: as llama3, but the blend is linear in the index of the channel pair, and the cos and sin
        tables are multiplied by `attention_factor` (Peng et al., arXiv 2309.00071).
    """

    none = "none"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


class YarnRamp(Enum):
    """Convention for the pairs of channels between which YaRN blends frequencies.

    The blend begins at the pair that makes `beta_fast` turns, and ends at the pair that makes
    `beta_slow` turns, over the original context.

    transformers: indices are rounded outwards, and the last is at most d - 1.
    exact: as transformers, without rounding (truncate=false in transformers).
    olmo_core: as transformers, but the last index is at most d/2 - 1, the index of the last pair.
    """

    transformers = "transformers"
    exact = "exact"
    olmo_core = "olmo_core"


@dataclass
class RopeConfig:
    """Settings of RoPE. Before scaling, channel pair c has the frequency theta^(-2c/d)."""

    theta: float = key(
        10_000.0,
        least=1,
        effect="numbers",
        may_differ="stage",
        help="Base of the frequencies; a larger base rotates more slowly.",
    )
    scaling: RopeScaling = key(
        RopeScaling.none,
        effect="numbers",
        may_differ="stage",
        help="Scaling of the frequencies for contexts longer than the training context.",
    )
    factor: float = key(
        1.0,
        least=1,
        effect="numbers",
        may_differ="stage",
        read_by=("linear", "llama3", "yarn"),
        help="Length of the new context divided by `original_seq_len`.",
    )
    original_seq_len: int | None = key(
        None,
        effect="numbers",
        may_differ="stage",
        read_by=("llama3", "yarn"),
        help="Original context length in tokens; required by llama3 and yarn.",
    )
    low_freq_factor: float = key(
        1.0,
        above=0,
        effect="numbers",
        may_differ="stage",
        read_by=("llama3",),
        help="For llama3: divide frequencies below this many turns in the original context.",
    )
    high_freq_factor: float = key(
        4.0,
        effect="numbers",
        may_differ="stage",
        read_by=("llama3",),
        help="For llama3: keep frequencies above this many turns in the original context.",
    )
    beta_slow: float = key(
        1.0,
        above=0,
        effect="numbers",
        may_differ="stage",
        read_by=("yarn",),
        help="For yarn: the counterpart of low_freq_factor.",
    )
    beta_fast: float = key(
        32.0,
        effect="numbers",
        may_differ="stage",
        read_by=("yarn",),
        help="For yarn: the counterpart of high_freq_factor.",
    )
    yarn_ramp: YarnRamp = key(
        YarnRamp.transformers,
        effect="numbers",
        may_differ="stage",
        read_by=("yarn",),
        help="For yarn: convention for the ends of the blend: transformers, exact or olmo_core. "
        "olmo_core differs only if the slowest pair makes more than beta_slow turns in the "
        "original context.",
    )
    attention_factor: float | None = key(
        None,
        above=0,
        effect="numbers",
        may_differ="stage",
        read_by=("yarn",),
        help="For yarn: factor on cos and sin; null: 0.1 ln(factor) + 1.",
    )

    def validate(self) -> None:
        for rope_field in fields(self):
            value = getattr(self, rope_field.name)
            scalings = declaration(rope_field).read_by
            if scalings and value != rope_field.default and self.scaling.name not in scalings:
                raise ConfigError(
                    f"model.rope.{rope_field.name}={value} needs model.rope.scaling="
                    f"{' or '.join(scalings)}, not {self.scaling.name}"
                )
        if self.scaling is RopeScaling.none:
            return
        if self.scaling is not RopeScaling.linear:
            if self.original_seq_len is None or self.original_seq_len < 1:
                raise ConfigError(
                    f"model.rope.original_seq_len={self.original_seq_len} must be at least 1 for "
                    f"model.rope.scaling={self.scaling.name}; set it to the context length of the "
                    "original model"
                )
            if self.theta <= 1:
                raise ConfigError(
                    f"model.rope.theta={self.theta} must be greater than 1 for model.rope.scaling="
                    f"{self.scaling.name}"
                )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not getattr(self, low) < getattr(self, high):
                raise ConfigError(
                    f"model.rope.{low}={getattr(self, low)} must be less than "
                    f"model.rope.{high}={getattr(self, high)}"
                )


def frequencies(cfg: RopeConfig, head_dim: int) -> Tensor:
    """Return the scaled frequency of each channel pair in radians per position, (d/2,) float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    original = cfg.theta**-exponents
    if cfg.scaling is RopeScaling.none:
        return original
    if cfg.scaling is RopeScaling.linear:
        return original / cfg.factor
    assert cfg.original_seq_len is not None
    blend = llama3_weights if cfg.scaling is RopeScaling.llama3 else yarn_weights
    weights = blend(cfg, original, cfg.original_seq_len).clamp(0, 1)
    return weights * original + (1 - weights) * original / cfg.factor


def llama3_weights(cfg: RopeConfig, original: Tensor, length: int) -> Tensor:
    """Compute one weight per frequency for llama3 scaling, (d/2,).

    Weight 1 keeps the frequency, and weight 0 divides the frequency by `factor`. The weight rises
    linearly with the number of turns over `length` positions, from 0 at `low_freq_factor` turns to
    1 at `high_freq_factor` turns. The caller clamps the weights to [0, 1].
    """
    turns = length * original / (2 * math.pi)
    return (turns - cfg.low_freq_factor) / (cfg.high_freq_factor - cfg.low_freq_factor)


def yarn_weights(cfg: RopeConfig, original: Tensor, length: int) -> Tensor:
    """Compute one weight per frequency for YaRN scaling, (d/2,).

    Weight 1 keeps the frequency, and weight 0 divides the frequency by `factor`. The weight falls
    linearly with the index of the channel pair (section 3.2 of the YaRN paper). The weight is 1 at
    the pair that makes `beta_fast` turns over `length` positions, and 0 at the pair that makes
    `beta_slow` turns; see `YarnRamp` for rounding. The caller clamps the weights to [0, 1].
    """
    head_dim = 2 * len(original)
    first = yarn_pair(cfg, head_dim, cfg.beta_fast)
    last = yarn_pair(cfg, head_dim, cfg.beta_slow)
    if cfg.yarn_ramp is not YarnRamp.exact:
        first, last = math.floor(first), math.ceil(last)
    # transformers limits the index of a pair by the number of channels, twice the number of pairs.
    # Imported models need the same rule.
    limit = len(original) if cfg.yarn_ramp is YarnRamp.olmo_core else head_dim
    first = max(first, 0)
    last = min(last, limit - 1)
    index = torch.arange(len(original), dtype=torch.float64, device="cpu")
    return 1 - (index - first) / max(last - first, 1e-3)


def yarn_pair(cfg: RopeConfig, head_dim: int, turns: float) -> float:
    """Return the index of the channel pair that makes `turns` turns over the original context."""
    assert cfg.original_seq_len is not None
    longest = math.log(cfg.original_seq_len / (turns * 2 * math.pi))
    return head_dim * longest / (2 * math.log(cfg.theta))


def with_rounded_ramp(cfg: RopeConfig, head_dim: int) -> RopeConfig:
    """Return a config with equal frequencies and the convention of transformers, not OLMo-core."""
    last = head_dim // 2 - 1
    if cfg.yarn_ramp is not YarnRamp.olmo_core:
        return cfg
    cfg = replace(cfg, yarn_ramp=YarnRamp.transformers)
    first = yarn_pair(cfg, head_dim, cfg.beta_fast)
    end = yarn_pair(cfg, head_dim, cfg.beta_slow)
    if math.ceil(end) <= last or first >= last:  # the conventions are equal
        return cfg
    assert cfg.original_seq_len is not None
    # The index last - 1/2 is rounded up to `last`.
    frequency = cfg.theta ** (-(2 * last - 1) / head_dim)
    slow = cfg.original_seq_len / (2 * math.pi) * frequency
    return replace(cfg, beta_slow=slow)


def attention_factor(cfg: RopeConfig) -> float:
    """Return the number by which the cos and sin tables are multiplied.

    The number is 1 without YaRN. With YaRN, it is `cfg.attention_factor`, by default
    0.1 ln(factor) + 1 (section 3.4 of the YaRN paper).
    """
    if cfg.scaling is not RopeScaling.yarn:
        return 1.0
    if cfg.attention_factor is not None:
        return cfg.attention_factor
    return 0.1 * math.log(cfg.factor) + 1


class RotaryEmbedding(nn.Module):
    """The cos and sin tables of RoPE for positions 0 to seq_len - 1."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, seq_len: int, cfg: RopeConfig):
        super().__init__()
        self.head_dim, self.seq_len, self.cfg = head_dim, seq_len, cfg
        self.register_buffer("cos", torch.empty(seq_len, 1, head_dim), persistent=False)
        self.register_buffer("sin", torch.empty(seq_len, 1, head_dim), persistent=False)

    def reset_parameters(self) -> None:
        """Compute the cos and sin tables in float64; store the tables in float32."""
        # float64, because the rounding error of a float32 angle grows with the position.
        positions = torch.arange(self.seq_len, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies(self.cfg, self.head_dim))
        angles = angles.repeat(1, 2).unsqueeze(1)
        factor = attention_factor(self.cfg)
        self.cos.copy_(factor * angles.cos())
        self.sin.copy_(factor * angles.sin())

    def forward(self, start: int, length: int) -> Rope:
        return self.cos[start : start + length], self.sin[start : start + length]

    def at(self, positions: Tensor) -> Rope:
        return self.cos[positions], self.sin[positions]


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate x (B, T, H, d) by the cos and sin tables of the T positions.

    Computes x cos + rotate_half(x) sin in float32 or wider; the result has the dtype of x.
    """
    cos, sin = rope  # float32, so products with bf16 are float32
    # A compiler fuses the formula into one kernel. In eager mode, fewer operations are faster.
    if not torch.compiler.is_compiling():
        return _Rotation.apply(x, cos, sin)
    low, high = x.chunk(2, dim=-1)
    # Both halves of the tables are equal, so read only one.
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    rotated_low = low * cos - high * sin
    rotated_high = high * cos + low * sin
    return torch.cat((rotated_low, rotated_high), dim=-1).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute the result of `apply_rope` in eager mode, with few passes over memory.

    cos and sin are (T, 1, d) or (B, T, 1, d).
    """
    half = x.shape[-1] // 2
    out = x * cos
    turned = x * sin
    out[..., :half] -= turned[..., half:]
    out[..., half:] += turned[..., :half]
    return out.to(x.dtype)


class _Rotation(torch.autograd.Function):
    """Autograd function of `rotated`; the backward pass rotates by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return rotated(grads[0], cos, -sin), None, None
