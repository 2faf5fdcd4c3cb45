"""Rotary position embedding in the rotate-half layout (Su et al., arXiv 2104.09864).

Shapes: B batch, T tokens, H heads, d head_dim.
"""

import torch
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]  # cos and sin, each (T, 1, d), or (B, T, 1, d), float32


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin for positions 0 .. seq_len - 1."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, seq_len: int, theta: float):
        super().__init__()
        self.head_dim, self.seq_len, self.theta = head_dim, seq_len, theta
        self.register_buffer("cos", torch.empty(seq_len, 1, head_dim), persistent=False)
        self.register_buffer("sin", torch.empty(seq_len, 1, head_dim), persistent=False)

    def reset_parameters(self) -> None:
        """Fill the tables; computed in float64, kept in float32."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu")
        frequencies = self.theta ** (-exponents / self.head_dim)
        positions = torch.arange(self.seq_len, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies).repeat(1, 2).unsqueeze(1)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, start: int, length: int) -> Rope:
        """The tables of `length` positions from `start` on, each (length, 1, d)."""
        return self.cos[start : start + length], self.sin[start : start + length]

    def at(self, positions: Tensor) -> Rope:
        """The tables of positions (B, T), each (B, T, 1, d)."""
        return self.cos[positions], self.sin[positions]


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate x (B, T, H, d) by its positions: x cos + rotate_half(x) sin, in float32 or wider."""
    cos, sin = rope  # float32: products with bf16 are float32
    low, high = x.chunk(2, dim=-1)
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return rotated.to(x.dtype)
