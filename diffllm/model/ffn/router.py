"""Config of the mixture of experts, its router, and the losses that balance the experts' loads.

Shapes: N tokens, D model width, E experts, k experts per token.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.core.errors import ConfigError
from diffllm.core.keys import key
from diffllm.core.torch_versions import IS_ROCM
from diffllm.model.attention.ops import at_least_float32
from diffllm.model.attention.slices import Slices
from diffllm.model.auto_setting import AutoSetting, dtype_name


class Score(Enum):
    """Function that turns router logits into expert scores."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class Balance(Enum):
    """Tokens over which the load-balancing loss computes the loads of experts.

    sequence: the tokens of each sequence.
    global_batch: the tokens of the global batch of the previous optimizer step.
    """

    sequence = "sequence"
    global_batch = "global_batch"


@dataclass
class MoEConfig:
    """Settings of a mixture of SwiGLU experts with top-k routing, which drops no tokens."""

    n_experts: int = key(
        0,
        least=0,
        most=2**16,
        effect="numbers",
        help="Routed experts per layer; 0 is a dense model, which ignores the other fields.",
    )
    top_k: int = key(
        2,
        least=1,
        most=2**16,
        effect="numbers",
        help="Routed experts per token.",
    )
    expert_dim: int = key(
        0,
        least=0,
        most=2**24,
        effect="numbers",
        may_differ=("report", "study"),
        help="Width of each routed and each shared expert.",
    )
    n_shared: int = key(
        0,
        least=0,
        most=2**10,
        effect="numbers",
        help="Shared experts, used by all tokens: one SwiGLU of width n_shared * expert_dim.",
    )
    n_dense_layers: int = key(
        0,
        least=0,
        effect="numbers",
        help="Number of first layers that are dense, with width `ffn_dim`.",
    )
    score: Score = key(
        Score.sigmoid,
        effect="numbers",
        help="Function that turns router logits into scores.",
    )
    renormalise: bool = key(
        True,
        effect="numbers",
        help="Scale the weights of the top_k experts of a token to sum 1.",
    )
    routed_scaling: float = key(
        1.0,
        above=0,
        effect="numbers",
        help="Factor on the routed experts' weights (DeepSeek-V3, arXiv 2412.19437, equation 16).",
    )
    bias_update_rate: float = key(
        1e-3,
        least=0,
        effect="numbers",
        may_differ=("report", "stage"),
        help="Change of the balancing bias per optimizer step; 0: no bias. Wang et al., arXiv "
        "2408.15664. The default suits sigmoid scores. Softmax scores average 1 / n_experts: "
        "from 32 experts on, a step of the default is several percent of a score.",
    )
    balance_loss: float = key(
        0.0,
        least=0,
        effect="numbers",
        may_differ=("report", "stage"),
        help="Weight of the load-balancing loss per layer; losses are summed over layers.",
    )
    balance_over: Balance = key(
        Balance.global_batch,
        effect="numbers",
        may_differ=("report", "stage"),
        help="Tokens over which the load-balancing loss computes expert loads. sequence: each "
        "sequence (DeepSeek-V3, equations 17 to 20). global_batch: the whole batch of the "
        "previous optimizer step (Qiu et al., arXiv 2501.11873).",
    )
    router_z_loss: float = key(
        0.0,
        least=0,
        effect="numbers",
        may_differ=("report", "stage"),
        help="Weight of mean(logsumexp(router logits)^2) per layer (ST-MoE, arXiv 2202.08906).",
    )

    def validate(self, n_layers: int) -> None:
        if self.n_experts == 0:
            return
        if self.top_k > self.n_experts:
            raise ConfigError(
                f"model.moe.top_k={self.top_k} must be at most model.moe.n_experts={self.n_experts}"
            )
        if self.expert_dim < 1:
            raise ConfigError(
                f"model.moe.expert_dim={self.expert_dim} must be at least 1 for "
                f"model.moe.n_experts={self.n_experts}"
            )
        if self.n_dense_layers >= n_layers:
            raise ConfigError(
                f"model.moe.n_dense_layers={self.n_dense_layers} must be less than "
                f"model.n_layers={n_layers}"
            )


EPS = 1e-20
BF16_PARTS = 3
"""Number of bf16 numbers, with 8 significant bits each, for the 24 bits of a float32."""
HIGH_BITS = -(1 << 16)
"""Mask of the bits that a float32 shares with bf16."""
FLOAT32 = "float32"
SPLIT = "bf16 products, float32 sums"


class Routing(NamedTuple):
    """Output of the router for N tokens: the chosen experts, and the scores of all experts."""

    experts: Tensor
    """Indices of the chosen experts, (N, k) int64, distinct within a row."""
    weights: Tensor
    """Factors on the experts' outputs, (N, k) float32."""
    shares: Tensor
    """Scores of all experts, scaled so that each row sums to 1: (N, E) float32."""
    logits: Tensor
    """Router logits, (N, E) float32."""


class Router(nn.Module):
    """A linear layer that chooses, for each token, the k experts with the largest score plus bias.

    The bias affects only the choice of experts, not their weights, and has no gradient. After each
    optimizer step, the bias rises for experts with fewer tokens than the mean, and falls for
    experts with more (Wang et al., arXiv 2408.15664).
    """

    fp32_parameters = ("weight",)
    bias: Tensor
    load: Tensor

    def __init__(self, dim: int, cfg: MoEConfig):
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.n_experts, dim))
        self.register_buffer("bias", torch.zeros(cfg.n_experts))
        self.register_buffer("load", torch.ones(cfg.n_experts))

    def forward(self, x: Tensor) -> Routing:
        """Choose experts for tokens x (N, D) of any float dtype; compute in float32 or wider."""
        logits = router_logits(x, self.weight)
        if self.cfg.score is Score.softmax:
            scores = shares = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            shares = scores / (scores.sum(-1, keepdim=True) + EPS)
        # The bias decides the choice only: weights are the scores without the bias.
        biased = scores.detach() + self.bias
        experts = biased.topk(self.cfg.top_k, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.cfg.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + EPS)
        return Routing(experts, weights * self.cfg.routed_scaling, shares, logits)

    @torch.no_grad()
    def rebalance(self, counts: Tensor, skipped: Tensor) -> None:
        """Move `bias` towards equal counts; set `load` to `counts` divided by their mean.

        `counts` (E,) int64 is the number of tokens per expert, summed over ranks. A positive scalar
        `skipped` means a skipped optimizer step, after which `bias` and `load` do not change.
        """
        missing = counts.sum() - len(counts) * counts  # integers, so exactly 0 at the mean
        moved = self.bias + self.cfg.bias_update_rate * missing.sign()
        load = counts * (len(counts) / counts.sum())
        # torch.where, because reading `skipped` would wait for the device.
        keep = skipped > 0
        self.bias.copy_(torch.where(keep, self.bias, moved))
        self.load.copy_(torch.where(keep, self.load, load))

    def reset_buffers(self) -> None:
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.load)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply tokens x (N, D) by the transpose of `weight` (E, D) in float32 or wider: (N, E)."""
    dtype = at_least_float32(x.dtype)
    if router_product(x.device, x.dtype).value == SPLIT:
        return SplitProduct.apply(x, weight.to(dtype))
    return F.linear(x.to(dtype), weight.to(dtype))


def router_product(device: torch.device, dtype: torch.dtype) -> AutoSetting:
    """Choose how to compute router logits: one float32 product, or a sum of bf16 products."""
    if dtype != torch.bfloat16:
        return AutoSetting(FLOAT32, f"tokens are {dtype_name(dtype)}")
    if device.type != "cuda" or IS_ROCM:
        return AutoSetting(FLOAT32, "torch multiplies bf16 with float32 output only on CUDA")
    return AutoSetting(SPLIT, "as exact as float32, on faster units")


def tokens_per_expert(experts: Tensor, n_experts: int, padding: Tensor) -> Tensor:
    """Count the tokens that choose each of the E experts, without padding: (E,) int64.

    `experts` (N, k) int64 holds the chosen experts, `padding` (N,) boolean is True for padding.
    """
    # Sums of 0 and 1 in integers are exact for any number of tokens.
    real = (~padding).long().unsqueeze(1).expand_as(experts)
    return real.new_zeros(n_experts).scatter_add(0, experts.flatten(), real.flatten())


def sequence_balance(
    shares: Tensor, experts: Tensor, padding: Tensor, slices: Slices | None = None
) -> Tensor:
    """Sum the load-balancing losses of B sequences, each multiplied by its number of tokens.

    The loss of a sequence is the sum over experts of f * P (DeepSeek-V3, arXiv 2412.19437,
    equations 17 to 20). f is the number of tokens that choose the expert, divided by the mean of
    this number over experts. P is the mean of the expert's shares over the tokens of the sequence.
    The loss is 1 if all experts have equally many tokens. Padding is no token.

    Args:
        shares: expert scores scaled to sum 1 per token, 0 for padding, (N, E), differentiable.
        experts: indices of the chosen experts, (N, k) int64.
        padding: True for padding, (B, T) boolean with B T = N.
        slices: if given, the tokens are this rank's slice of each sequence, T is the length of a
            slice, and the result is this rank's part of the sum.
    """
    n_experts, top_k = shares.shape[1], experts.shape[1]
    length = padding.shape[1]
    real = (~padding).to(shares.dtype)
    chosen = torch.zeros_like(shares).scatter(1, experts, 1.0)
    chosen = chosen.view(-1, length, n_experts) * real.unsqueeze(2)
    # Means over all T positions: without padding, the share of tokens is exactly 1.
    means = torch.cat((chosen.mean(1), real.mean(1, keepdim=True)), 1)
    if slices:
        # Collective: all ranks that share the sequences must reach this line. One call for both.
        means = slices.mean(means)
    token_share = means[:, -1:].clamp_min(EPS)
    load = means[:, :-1] / token_share * (n_experts / top_k)
    mean_shares = shares.view(-1, length, n_experts).mean(1)
    # The number of tokens cancels: it is a factor of the loss and the divisor of P.
    return length * (load * mean_shares).sum()


def global_balance(shares: Tensor, load: Tensor) -> Tensor:
    """Compute the load-balancing loss summed over N tokens, sum(shares * load).

    Args:
        shares: expert scores scaled to sum 1 per token, 0 for padding, (N, E), differentiable.
        load: tokens per expert in the global batch of the previous optimizer step, divided by their
            mean over experts: (E,).
    """
    return (shares * load).sum()


class SplitProduct(torch.autograd.Function):
    """Product of bf16 x (N, D) and a transposed float32 weight (E, D): (N, E) float32.

    Each float32 weight is split into three bf16 numbers. Products of two bf16 numbers are exact in
    float32, so only the float32 sums round. The gradient of the weight is computed in the same way;
    the gradient of x is one bf16 product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        # One product with the parts side by side reads x only once.
        parts = torch.cat(split(weight))
        out = float32_mm(x, parts.t())
        return out.unflatten(1, (BF16_PARTS, -1)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        grad_x = grad.to(x.dtype) @ weight.to(x.dtype)
        parts = torch.cat(split(grad), 1)
        grad_weight = float32_mm(parts.t(), x)
        return grad_x, grad_weight.unflatten(0, (BF16_PARTS, -1)).sum(0)


def split(x: Tensor) -> list[Tensor]:
    """Split float32 x into three bf16 tensors whose sum is x.

    The sum is exact where x is 0 or the magnitude of x is at least 2^-100.
    """
    parts = []
    for _ in range(BF16_PARTS):
        # Mask bits, because compilers remove a conversion to bf16 and back to float32.
        part = (x.view(torch.int32) & HIGH_BITS).view(torch.float32)
        parts.append(part.bfloat16())
        x = x - part
    return parts


def float32_mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)
