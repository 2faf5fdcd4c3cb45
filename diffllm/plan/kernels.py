"""Stand-ins for kernels that a GPU has and a CPU composes of smaller ones, for the memory they
keep."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from diffllm.model import loss


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Return a context in which some operations take the memory that they take on a GPU.

    These are uncompiled RMSNorms and the loss's sum of weight gradients. What they return has no
    meaning.
    """

    def rms_norm(
        x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return composed(x, shape, weight, eps)
        return _RMSNorm.apply(x, weight)

    def add_weight_gradient(total: Tensor | None, grad_logits: Tensor, hidden: Tensor) -> Tensor:
        if total is not None:
            return total
        shape = grad_logits.shape[1], hidden.shape[1]
        return torch.zeros(shape, dtype=torch.float32, device=hidden.device)

    composed = F.rms_norm
    with (
        patch.object(F, "rms_norm", rms_norm),
        patch.object(loss, "add_weight_gradient", add_weight_gradient),
    ):
        yield


class _RMSNorm(torch.autograd.Function):
    """An RMSNorm that keeps its input and one number a row, as the fused kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)
