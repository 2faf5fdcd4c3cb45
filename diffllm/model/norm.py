"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., dim) of any float dtype; shape and dtype stay."""
        return F.rms_norm(x, (self.dim,), self.weight, self.eps)
