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
MOST_GROUPS = 1024
"""Experts from which on CUDA has no grouped product."""


class Experts(nn.Module):
    """E SwiGLU experts, each on rows of its own."""

    def __init__(self, n_experts: int, dim: int, expert_dim: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, expert_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, expert_dim, dim))
        self.activation: Any = weighted_swiglu

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
        gate, up = grouped_linear(x, self.w1, counts), grouped_linear(x, self.w3, counts)
        return grouped_linear(self.activation(gate, up, weights), self.w2, counts)

    def reset_parameters(self, init: Initializer, std: float, out_std: float) -> None:
        """As SwiGLU's: truncated normal, the output projections at `out_std`."""
        init.normal_(self.w1, std, truncate=3)
        init.normal_(self.w3, std, truncate=3)
        init.normal_(self.w2, out_std, truncate=3)


def weighted_swiglu(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """weight * silu(gate) * up: (M, F) from (M, F) twice and (M,) float, in the dtype of gate."""
    return F.silu(gate) * up * weights.to(gate.dtype).unsqueeze(1)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows (M, in), sorted by expert, times the transpose of their expert's (out, in): (M, out).

    Args:
        weight: (E, out, in), the dtype of x.
        counts: (E,) int64, rows of each expert.
    """
    return expert_linear(x, weight, counts.cumsum(0, dtype=torch.int32))


def takes_groups(x: Tensor, n_experts: int, widths: tuple[int, int]) -> bool:
    """Whether one grouped product can do it: device, dtype, sizes and alignment."""
    return (
        x.device.type in ("cpu", "cuda")
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and len(x) > 0
        and n_experts < MOST_GROUPS
        and all(width * x.element_size() % ALIGNMENT == 0 for width in widths)
    )


# One operation to compilers, which know grouped products in bf16 only.
@torch.library.custom_op("diffllm::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear`; `ends` (E,) int32 are the rows behind each expert's last."""
    n_experts, out, width = weight.shape
    if takes_groups(x, n_experts, (out, width)):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    return torch.cat([rows @ w.T for rows, w in zip(of_experts(x, ends), weight, strict=True)])


@torch.library.custom_op("diffllm::expert_weight_grad", mutates_args=())
def expert_weight_grad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Gradient (E, out, in) of `weight`, from that of the output (M, out) and x (M, in)."""
    if takes_groups(x, len(ends), (grad.shape[1], x.shape[1])):
        # Some kernels leave what was in memory where an expert has no rows.
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return F.grouped_mm(grad.t(), x, offs=ends).masked_fill_(empty[:, None, None], 0)
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
