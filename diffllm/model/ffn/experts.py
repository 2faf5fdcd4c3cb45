"""Experts as stacked tensors, and the products that run them on rows sorted by expert.

Shapes: M rows, E experts, D model width, F expert width.
"""

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
    if not takes_groups(x, weight):
        return looped_linear(x, weight, counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def takes_groups(x: Tensor, weight: Tensor) -> bool:
    """Whether one grouped product can do it: device, dtype and alignment."""
    return (
        x.device.type in ("cpu", "cuda")
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(size * x.element_size() % ALIGNMENT == 0 for size in weight.shape[1:])
    )


def looped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`grouped_linear` expert by expert; reads the counts on the host."""
    rows = x.split(counts.tolist())
    return torch.cat([part @ w.T for part, w in zip(rows, weight.unbind(), strict=True)])
