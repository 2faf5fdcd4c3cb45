"""Products of bf16 rows and a float32 matrix, computed on bf16 units without losing precision.

Three bf16 numbers of 8 significant bits hold a float32 of 24. The product of two bf16 numbers is
exact in float32, so only the float32 sums round, as they do in a float32 product.

Shapes: N rows, D in, E out.
"""

from typing import Any

import torch
from torch import Tensor

PARTS = 3
HIGH_BITS = -(1 << 16)
"""The mask of those bits of a float32 that a bf16 has too."""


class SplitProduct(torch.autograd.Function):
    """The product of x (N, D) in bf16 and the transpose of a float32 weight (E, D): (N, E) float32.

    The gradient of the weight is float32, and as exact. That of x is one product of bf16 numbers,
    like the gradients that x gets from elsewhere.
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
    """Split a float32 tensor into three bf16 tensors whose sum it is, exactly.

    Exact for values of 2^-100 or more, and 0: the parts of smaller ones may be flushed to zero.
    """
    parts = []
    for _ in range(PARTS):
        # Masks bits, because compilers drop a rounding to bf16 that goes back to float32 at once.
        part = (x.view(torch.int32) & HIGH_BITS).view(torch.float32)
        parts.append(part.bfloat16())
        x = x - part
    return parts


def float32_mm(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two bf16 matrices in float32; CUDA only, and without a derivative."""
    return torch.mm(a, b, out_dtype=torch.float32)
