"""Feed-forward layers: SwiGLU, and the mixture of experts.

Shapes: B sequences of T tokens, N = B T, D model width, E experts, k experts per token.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.model.attention.slices import Slices
from diffllm.model.auto_setting import AutoSetting
from diffllm.model.ffn.experts import Experts, grouped_product, rows_to_join
from diffllm.model.ffn.router import (
    Balance,
    MoEConfig,
    Router,
    Routing,
    global_balance,
    router_product,
    sequence_balance,
    tokens_per_expert,
)
from diffllm.model.loss import Losses, Term


class SwiGLU(nn.Module):
    """Dense feed-forward layer w2(silu(w1 x) * w3 x) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # One name, so that without gradients the memory of the gate is free in the last product.
        hidden = F.silu(self.w1(x))
        hidden = hidden * self.w3(x)
        return self.w2(hidden)

    def flops_per_token(self) -> int:
        """Count training FLOPs per token: 6 per weight (2 forward, 4 backward)."""
        size = sum(param.numel() for param in self.parameters())
        return 6 * size


class Routed(NamedTuple):
    """Tokens per expert and router losses of one MoE layer. Padding is no token."""

    counts: Tensor
    """Tokens per expert, (E,) int64."""
    losses: Losses
    """Differentiable load-balancing loss and logsumexp(router logits)^2; 0 if the weight is 0."""


class MoE(nn.Module):
    """Mixture-of-experts layer: the weighted sum of the outputs of each token's chosen experts.

    `n_shared` shared experts process all tokens; their outputs are added without a weight. Experts
    have no capacity limit, so no token is dropped.
    """

    def __init__(self, dim: int, cfg: MoEConfig):
        super().__init__()
        self.cfg = cfg
        self.router = Router(dim, cfg)
        self.experts = Experts(cfg.n_experts, dim, cfg.expert_dim)
        shared_dim = cfg.n_shared * cfg.expert_dim
        self.shared = SwiGLU(dim, shared_dim) if cfg.n_shared else None

    def forward(
        self,
        x: Tensor,
        aux: dict[str, Tensor] | None = None,
        slices: Slices | None = None,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, Routed]:
        """Apply the layer to x (B, T, D); return the output (B, T, D) and the layer's `Routed`.

        If `slices` is given, x is this rank's slice of each sequence.
        If `aux` is given, set aux["router"] to the scores of all experts, (N, E), which are scaled
        so that they sum to 1 for each token, and to 0 for padding.
        `padding` (B, T) boolean is True for padding; None means no padding. Experts also process
        padding, because a constant number of rows avoids a wait for the device.
        """
        rows = x.flatten(0, 1)
        routing = self.router(rows)
        if padding is None:
            padding = x.new_zeros(x.shape[:2], dtype=torch.bool)
        shares = routing.shares.masked_fill(padding.view(-1, 1), 0)
        routing = routing._replace(shares=shares)
        if aux is not None:
            aux["router"] = routing.shares.detach()
        # A slot is one expert of a token; `order` sorts slots by expert, `inverse` undoes `order`.
        slots = routing.experts.flatten()
        order = slots.argsort(stable=True)
        inverse = torch.empty_like(order)
        # No name for the positions, so that their memory is free during the products.
        inverse = inverse.scatter_(0, order, torch.arange(len(order), device=order.device))
        # These counts include padding, because the experts process its rows.
        counts = torch.zeros_like(self.router.bias, dtype=torch.int64)
        counts = counts.scatter_add(0, slots, torch.ones_like(slots))
        sent = _Send.apply(rows, order, inverse)
        weights = routing.weights.flatten().gather(0, order)
        received = self.experts(sent, weights, counts)
        shared = self.shared(rows) if self.shared is not None else None
        out = _Return.apply(received, order, inverse, len(rows))
        if shared is not None:
            out = out + shared
        return out.view_as(x), self.routed(routing, padding, slices)

    def routed(self, routing: Routing, padding: Tensor, slices: Slices | None = None) -> Routed:
        """Count the tokens per expert and compute the router losses of this layer.

        `routing.shares` is 0 for padding. `padding` (B, T) is True for padding. If `slices` is
        given, the tokens are this rank's slice of each sequence.
        """
        is_padding = padding.flatten()  # (N,)
        counts = tokens_per_expert(routing.experts, self.cfg.n_experts, is_padding)
        balance = z = routing.logits.new_zeros(())
        if self.cfg.balance_loss:
            if self.cfg.balance_over is Balance.sequence:
                balance = sequence_balance(routing.shares, routing.experts, padding, slices)
            else:
                balance = global_balance(routing.shares, self.router.load)
        if self.cfg.router_z_loss:
            squares = routing.logits.logsumexp(-1).square()
            z = squares.masked_fill(is_padding, 0).sum()
        return Routed(counts, {Term.balance_loss: balance, Term.router_z_loss: z})

    def choices(self, device: torch.device, dtype: torch.dtype) -> dict[str, AutoSetting]:
        """Return the algorithm chosen for each matrix product, with the reason for the choice."""
        _, width, dim = self.experts.w1.shape
        widths = (width, dim)
        joining = rows_to_join(device, dtype, self.experts.w1, self.experts.w3)
        if joining.value is None:
            gate_up = "two products"
        elif joining.value == 0:
            gate_up = "one product"
        else:
            gate_up = f"one product from {joining.value} rows per expert"
        return {
            "router_product": router_product(device, dtype),
            "expert_products": grouped_product(device, dtype, self.cfg.n_experts, widths),
            "gate_and_up": AutoSetting(gate_up, joining.reason),
        }

    def idle_parameters(self) -> int:
        n_experts = self.cfg.n_experts
        size_of_experts = sum(param.numel() for param in self.experts.parameters())
        n_idle = n_experts - self.cfg.top_k
        return n_idle * (size_of_experts // n_experts)

    def flops_per_token(self) -> int:
        """Count training FLOPs per token: 6 per weight, without the experts that are not chosen."""
        size = sum(param.numel() for param in self.parameters())
        return 6 * (size - self.idle_parameters())


class _Send(torch.autograd.Function):
    """Copies the row of each token once per chosen expert and sorts the copies by expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.n = len(rows)
        top_k = len(order) // len(rows)
        return rows.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        grad_rows = summed(grads[0], inverse, ctx.n)
        return grad_rows, None, None


class _Return(torch.autograd.Function):
    """Sums the expert outputs of each token; the input rows are sorted by expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.n = n
        return summed(rows, inverse, n)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        top_k = len(order) // ctx.n
        grad_rows = grads[0].index_select(0, order // top_k)
        return grad_rows, None, None, None


def summed(rows: Tensor, inverse: Tensor, n: int) -> Tensor:
    """Sum the k rows of each of n tokens: `rows` (n k, D) become (n, D).

    `rows` are sorted by expert, and rows[inverse] by token; `inverse` is (n k,).
    """
    # One kernel that gathers and sums: indexing first would write all n k rows again.
    rows_of_token = inverse.view(n, -1)  # (n, k)
    return F.embedding_bag(rows_of_token, rows, mode="sum")
