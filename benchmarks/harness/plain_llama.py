"""A Llama in plain torch, to measure the speed without a framework.

The model has no config, variants, diagnostics or sharding. One product computes queries, keys and
values, and one product computes gate and up. The loss uses all logits at once.

Shapes: B batch, T tokens, D model width, d head_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.model import ModelConfig


class PlainLlama(nn.Module):
    """RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.embedding = nn.Embedding(m.vocab_size, m.dim)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.n_layers))
        self.norm = nn.RMSNorm(m.dim, m.norm_eps)
        self.output = nn.Linear(m.dim, m.vocab_size, bias=False)
        frequencies = m.rope.theta ** -(torch.arange(0, m.head_dim, 2) / m.head_dim)
        angles = torch.outer(torch.arange(m.seq_len), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=m.init_std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of tokens (B, T) and targets (B, T), int64."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Block(nn.Module):
    """Attention and feed-forward with residuals, (B, T, D) -> (B, T, D)."""

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.d = m.n_heads, m.n_kv_heads, m.head_dim
        self.attention_norm = nn.RMSNorm(m.dim, m.norm_eps)
        self.qkv = nn.Linear(m.dim, (m.n_heads + 2 * m.n_kv_heads) * m.head_dim, bias=False)
        self.wo = nn.Linear(m.n_heads * m.head_dim, m.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(m.dim, m.norm_eps)
        self.gate_up = nn.Linear(m.dim, 2 * m.ffn_dim, bias=False)
        self.down = nn.Linear(m.ffn_dim, m.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.d)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        context = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.wo(context.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE in the rotate-half layout: x (B, heads, T, d), tables (T, d)."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)
