"""The attention variants written from their equations, with explicit maps. Imports nothing of ours.

Shapes: q (B, T, H', d), k and v (B, T, K', d), as the projections make them, RoPE applied.
"""

import math

import torch


def causal_map(q, k):
    """One head: q (T, d), k (T, d) -> softmax weights (T, T)."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)


def rms_norm(x, weight, eps):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def standard(q, k, v):
    group = q.shape[2] // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            j = h // group
            out[b, :, h] = causal_map(q[b, :, h], k[b, :, j]) @ v[b, :, j]
    return out


def gated(q, k, v, gate):
    """gate (B, T, H, d or 1), before the sigmoid."""
    return torch.sigmoid(gate) * standard(q, k, v)


def diff_v1(q, k, v, lambda_vectors, norm_weight, layer_idx, eps=1e-5):
    """-> (B, T, H/2, 2d). lambda_vectors: q1, k1, q2, k2."""
    batch, tokens, heads, d = q.shape
    group = heads // k.shape[2]
    q1, k1, q2, k2 = lambda_vectors
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
    lam = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + lambda_init
    out = torch.zeros(batch, tokens, heads // 2, 2 * d, dtype=q.dtype)
    for b in range(batch):
        for i in range(heads // 2):
            j = i // group
            value = torch.cat((v[b, :, 2 * j], v[b, :, 2 * j + 1]), dim=-1)
            first = causal_map(q[b, :, 2 * i], k[b, :, 2 * j])
            second = causal_map(q[b, :, 2 * i + 1], k[b, :, 2 * j + 1])
            out[b, :, i] = (first - lam * second) @ value
    return rms_norm(out, norm_weight, eps) * (1 - lambda_init)


def diff_v2(q, k, v, lam):
    """q has twice the heads; lam (B, T, H), before the sigmoid -> (B, T, H, d)."""
    maps = standard(q, k, v)
    return maps[:, :, 0::2] - torch.sigmoid(lam).unsqueeze(-1) * maps[:, :, 1::2]


def rope(x, theta):
    """x (B, T, H, d): channels c and c + d/2 turn together by t * theta^(-2c/d)."""
    _, tokens, _, d = x.shape
    out = torch.empty_like(x)
    for t in range(tokens):
        for c in range(d // 2):
            angle = t * theta ** (-2 * c / d)
            low, high = x[:, t, :, c], x[:, t, :, c + d // 2]
            out[:, t, :, c] = low * math.cos(angle) - high * math.sin(angle)
            out[:, t, :, c + d // 2] = high * math.cos(angle) + low * math.sin(angle)
    return out
