"""The config of the mixture of experts, and its router, which balances the load of experts.

Shapes: N tokens, T tokens of a sequence, D model width, E experts, k experts a token.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.core.bounds import bounded
from diffllm.core.errors import ConfigError
from diffllm.core.torch_versions import IS_ROCM
from diffllm.model.attention.ops import at_least_float32
from diffllm.model.auto_setting import AutoSetting, dtype_name


class Score(Enum):
    """The function that turns a token's router logits into scores."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class Balance(Enum):
    """The tokens over which the load-balancing loss compares experts."""

    sequence = "sequence"
    global_batch = "global_batch"


@dataclass
class MoEConfig:
    """Dropless top-k routing over SwiGLU experts, with balancing by bias, by loss, or both."""

    n_experts: int = bounded(0, least=0, most=2**16)
    """Routed experts of a layer; 0 is a dense model, for which the other fields are not read."""
    top_k: int = bounded(2, least=1, most=2**16)
    """Experts that a token is routed to."""
    expert_dim: int = bounded(0, least=0, most=2**24)
    """Width of each routed and of each shared expert."""
    n_shared: int = bounded(0, least=0, most=2**10)
    """Experts that every token goes to, as one SwiGLU of n_shared * expert_dim."""
    n_dense_layers: int = bounded(0, least=0)
    """Number of first layers that stay dense, `ffn_dim` wide."""
    score: Score = Score.sigmoid
    """Function that makes scores of a router's logits."""
    renormalise: bool = True
    """Make the weights of a token's top_k experts sum to 1."""
    routed_scaling: float = bounded(1.0, above=0)
    """Factor on the routed experts' weights (DeepSeek-V3, arXiv 2412.19437, equation 16)."""
    bias_update_rate: float = bounded(1e-3, least=0)
    """Change of the balancing bias at an optimizer step; 0: no bias. Wang et al., arXiv 2408.15664.
    The default is for sigmoid scores; of softmax, whose scores are 1 / n_experts on average, it
    would be several percent a step from 32 experts on."""
    balance_loss: float = bounded(0.0, least=0)
    """Weight of the load-balancing loss of a layer; the losses of layers are summed."""
    balance_over: Balance = Balance.global_batch
    """Tokens over which the load-balancing loss takes the experts' shares. With sequence as in
    DeepSeek-V3, equations 17 to 20; with global_batch those of the whole batch (Qiu et al., arXiv
    2501.11873), of the optimizer step before."""
    router_z_loss: float = bounded(0.0, least=0)
    """Weight of mean(logsumexp(router logits)^2) of a layer (ST-MoE, arXiv 2202.08906)."""

    def validate(self, n_layers: int) -> None:
        if self.n_experts == 0:
            return
        if self.top_k > self.n_experts:
            raise ConfigError(
                f"model.moe.top_k={self.top_k} must be at most model.moe.n_experts={self.n_experts}"
            )
        if self.expert_dim < 1:
            raise ConfigError(f"model.moe.expert_dim={self.expert_dim} must be at least 1")
        if self.n_dense_layers >= n_layers:
            raise ConfigError(
                f"model.moe.n_dense_layers={self.n_dense_layers} must be less than "
                f"model.n_layers={n_layers}"
            )


EPS = 1e-20
PARTS = 3
HIGH_BITS = -(1 << 16)
"""The mask of those bits of a float32 that a bf16 has too."""
FLOAT32 = "float32"
SPLIT = "bf16 products, float32 sums"


class Routing(NamedTuple):
    """The routing of N tokens."""

    experts: Tensor
    """Indices of each token's experts, (N, k) int64, distinct in each row."""
    weights: Tensor
    """Factors on the experts' outputs, (N, k) float32."""
    shares: Tensor
    """Scores of all experts, scaled so that each row sums to 1: (N, E) float32."""
    logits: Tensor
    """Router logits, (N, E) float32."""


class Router(nn.Module):
    """A linear layer that takes the top k of scores plus a bias; the weights are scores without it.

    The bias moves only where experts are chosen, so it has no gradient: after each optimizer
    step it goes up for experts with less than the mean of the tokens, down for those with more
    (Wang et al., arXiv 2408.15664).
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
        """Route x (N, D) of any float dtype; everything inside is in float32 at least."""
        logits = router_logits(x, self.weight)
        if self.cfg.score is Score.softmax:
            scores = shares = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            shares = scores / (scores.sum(-1, keepdim=True) + EPS)
        experts = (scores.detach() + self.bias).topk(self.cfg.top_k, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.cfg.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + EPS)
        return Routing(experts, weights * self.cfg.routed_scaling, shares, logits)

    @torch.no_grad()
    def rebalance(self, counts: Tensor, skipped: Tensor) -> None:
        """Update bias and load from the experts' tokens (E,) int64, unless `skipped` is 1.0."""
        missing = counts.sum() - len(counts) * counts  # integers: none at exactly the mean
        moved = self.bias + self.cfg.bias_update_rate * missing.sign()
        load = counts * (len(counts) / counts.sum())
        keep = skipped > 0
        self.bias.copy_(torch.where(keep, self.bias, moved))
        self.load.copy_(torch.where(keep, self.load, load))

    def reset_buffers(self) -> None:
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.load)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (N, D) with the transpose of weight (E, D): (N, E), float32 at least."""
    dtype = at_least_float32(x.dtype)
    if router_product(x.device, x.dtype).value == SPLIT:
        return SplitProduct.apply(x, weight.to(dtype))
    return F.linear(x.to(dtype), weight.to(dtype))


def router_product(device: torch.device, dtype: torch.dtype) -> AutoSetting:
    """Choose the product of tokens of `dtype` and the router's weight: `FLOAT32` or `SPLIT`."""
    if dtype != torch.bfloat16:
        return AutoSetting(FLOAT32, f"tokens are {dtype_name(dtype)}")
    if device.type != "cuda" or IS_ROCM:
        return AutoSetting(FLOAT32, "torch has bf16 products in float32 on CUDA only")
    return AutoSetting(SPLIT, "as exact as float32, on faster units")


def sequence_balance(shares: Tensor, experts: Tensor, length: int) -> Tensor:
    """Return T times the balance loss of a sequence, summed over sequences: a scalar.

    The loss is sum over experts of f P, f the tokens that chose the expert over the uniform
    number, P the mean share (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20): 1 when balanced.

    Args:
        shares: (N, E), differentiable; N is a multiple of `length`, the T of a sequence.
        experts: (N, k) int64.
    """
    n_experts, top_k = shares.shape[1], experts.shape[1]
    chosen = torch.zeros_like(shares).scatter(1, experts, 1.0).view(-1, length, n_experts)
    load = chosen.mean(1) * (n_experts / top_k)
    return length * (load * shares.view(-1, length, n_experts).mean(1)).sum()


def global_balance(shares: Tensor, load: Tensor) -> Tensor:
    """Return the balance loss of differentiable shares (N, E), summed over tokens: a scalar.

    load (E,): tokens of the global batch that chose each expert over the uniform number.
    """
    return (shares * load).sum()


class SplitProduct(torch.autograd.Function):
    """The product of x (N, D) in bf16 and the transpose of a float32 weight (E, D): (N, E) float32.

    Three bf16 numbers of 8 significant bits hold a float32 of 24, and the product of two bf16
    numbers is exact in float32: only the float32 sums round. The gradient of the weight is as
    exact; that of x is one product of bf16 numbers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = float32_mm(x, torch.cat(split(weight)).t())
        return out.unflatten(1, (PARTS, -1)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        grad_x = grad.to(x.dtype) @ weight.to(x.dtype)
        grad_weight = float32_mm(torch.cat(split(grad), 1).t(), x)
        return grad_x, grad_weight.unflatten(0, (PARTS, -1)).sum(0)


def split(x: Tensor) -> list[Tensor]:
    """Split a float32 tensor into three bf16 tensors of the same sum; exact from 2^-100, and for
    0."""
    parts = []
    for _ in range(PARTS):
        # Masks bits, because compilers drop a rounding to bf16 that goes back to float32 at once.
        part = (x.view(torch.int32) & HIGH_BITS).view(torch.float32)
        parts.append(part.bfloat16())
        x = x - part
    return parts


def float32_mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)
