"""Experts as stacked tensors, and the products that run them on rows sorted by expert.

Shapes: M rows, E experts, D model width, F expert width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.model.init import Initializer

ALIGNMENT = 16
"""Bytes that the rows of a grouped product's operands must be a multiple of."""


class Experts(nn.Module):
    """E SwiGLU experts, each on rows of its own."""

    def __init__(self, n_experts: int, dim: int, expert_dim: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, expert_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))

    def forward(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """weight * w2(silu(w1 x) * w3 x), each row through its expert.

        The weight is applied before w2: that is the same, and needs no output kept for its
        gradient.

        Args:
            x: (M, D), sorted by expert.
            weights: (M,) float, one a row.
            counts: (E,) int64, rows of each expert; they sum to M.

        Returns:
            (M, D) in the dtype of x.
        """
        hidden = F.silu(grouped_linear(x, self.w1, counts)) * grouped_linear(x, self.w3, counts)
        hidden = hidden * weights.to(x.dtype).unsqueeze(1)
        return grouped_linear(hidden, self.w2, counts)

    def reset_parameters(self, init: Initializer, std: float, out_std: float) -> None:
        """As SwiGLU's: truncated normal, the output projections at `out_std`."""
        init.normal_(self.w1, std, truncate=3)
        init.normal_(self.w3, std, truncate=3)
        init.normal_(self.w2, out_std, truncate=3)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows (M, in), sorted by expert, times the transpose of their expert's (out, in): (M, out).

    Args:
        weight: (E, out, in), the dtype of x.
        counts: (E,) int64, rows of each expert.
    """
    ends = counts.cumsum(0, dtype=torch.int32)
    if x.dtype == torch.bfloat16 and takes_groups(x, weight.shape[1:]):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    return expert_linear(x, weight, ends)  # compilers know grouped products in bf16 only


def takes_groups(x: Tensor, widths: torch.Size) -> bool:
    """Whether one grouped product can do it: device, dtype and alignment."""
    return (
        x.device.type in ("cpu", "cuda")
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(width * x.element_size() % ALIGNMENT == 0 for width in widths)
    )


@torch.library.custom_op("diffllm::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` in any dtype, in one piece for a compiler; `ends` (E,) int32 in rows."""
    if takes_groups(x, weight.shape[1:]):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    return torch.cat([rows @ w.T for rows, w in zip(of_experts(x, ends), weight, strict=True)])


@torch.library.custom_op("diffllm::expert_weight_grad", mutates_args=())
def expert_weight_grad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Gradient (E, out, in) of `weight`, from that of the output (M, out) and x (M, in)."""
    if takes_groups(x, torch.Size((grad.shape[1], x.shape[1]))):
        return F.grouped_mm(grad.t(), x, offs=ends)
    pairs = zip(of_experts(grad, ends), of_experts(x, ends), strict=True)
    return torch.stack([rows_grad.T @ rows for rows_grad, rows in pairs])


def of_experts(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Each expert's rows; reads `ends` on the host."""
    return rows.tensor_split(ends.tolist()[:-1])


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@expert_weight_grad.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), grad.shape[1], x.shape[1])


def keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return (
        expert_linear(grad, weight.transpose(1, 2), ends),
        expert_weight_grad(grad, x, ends),
        None,
    )


expert_linear.register_autograd(backward, setup_context=keep)
