"""The dense feed-forward layer, SwiGLU (Shazeer, arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """A feed-forward layer that computes w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer's output (B, T, dim) of x (B, T, dim)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def flops_per_token(self) -> int:
        """Count training FLOPs a token: 2 forward and 4 backward for every weight."""
        return 6 * sum(p.numel() for p in self.parameters())
