"""The router: which experts a token goes to, and what keeps experts equally busy.

Shapes: N tokens, T tokens of a sequence, E experts, k experts a token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.core.torch_versions import IS_ROCM
from diffllm.model.attention.ops import at_least_float32
from diffllm.model.choice import Choice
from diffllm.model.dtypes import dtype_name
from diffllm.model.ffn.config import MoEConfig, Score
from diffllm.model.ffn.split_product import SplitProduct

EPS = 1e-20
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
        """Learn how busy each expert was in an optimizer step, from the tokens of the whole global
        batch that it got, (E,) int64; a scalar `skipped` of 1.0 leaves all as it is."""
        missing = counts.sum() - len(counts) * counts  # integers: none at exactly the mean
        moved = self.bias + self.cfg.bias_update_rate * missing.sign()
        load = counts * (len(counts) / counts.sum())
        keep = skipped > 0
        self.bias.copy_(torch.where(keep, self.bias, moved))
        self.load.copy_(torch.where(keep, self.load, load))

    def reset_buffers(self) -> None:
        """Start with no bias and equally busy experts."""
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.load)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (N, D) with the transpose of weight (E, D): (N, E), float32 at least."""
    dtype = at_least_float32(x.dtype)
    if router_product(x.device, x.dtype).value == SPLIT:
        return SplitProduct.apply(x, weight.to(dtype))
    return F.linear(x.to(dtype), weight.to(dtype))


def router_product(device: torch.device, dtype: torch.dtype) -> Choice:
    """Choose the product of tokens of `dtype` and the router's weight: `FLOAT32` or `SPLIT`."""
    if dtype != torch.bfloat16:
        return Choice(FLOAT32, f"tokens are {dtype_name(dtype)}")
    if device.type != "cuda" or IS_ROCM:
        return Choice(FLOAT32, "torch has bf16 products in float32 on CUDA only")
    return Choice(SPLIT, "as exact as float32, on faster units")


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
