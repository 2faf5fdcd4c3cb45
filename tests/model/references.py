"""Attention variants written from the equations, with explicit maps; does not import diffllm.

Shapes: q (B, T, H', d), k and v (B, T, K', d), projected, after RoPE. A variant needs an entry in
REFERENCES at the end of this file; the tests find the rest through the YAML of the variant.
"""

import math

import torch


def causal_map(q, k, extra=0.0):
    """Return the map (T, T) of a head, q and k (T, d); `extra` is added to the denominator."""
    weights = torch.exp(q @ k.T / math.sqrt(q.shape[-1])).tril()
    return weights / (weights.sum(-1, keepdim=True) + extra)


def rms_norm(x, weight, eps):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def standard(q, k, v, extra=None):
    """Softmax attention; `extra` (H,) is added to the softmax denominator of each head."""
    group = q.shape[2] // k.shape[2]
    extra = torch.zeros(q.shape[2], dtype=q.dtype) if extra is None else extra
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            j = h // group
            out[b, :, h] = causal_map(q[b, :, h], k[b, :, j], extra[h]) @ v[b, :, j]
    return out


def gated(q, k, v, gate):
    """Gated attention; `gate` (B, T, H, d or 1) is before the sigmoid."""
    return torch.sigmoid(gate) * standard(q, k, v)


def diff_v1(q, k, v, lambda_vectors, lambda_init, norm_weight=None, clamp=False, eps=1e-5):
    """Return contexts (B, T, H/2, 2d); lambda_vectors: q1, k1, q2, k2; no weight, no head norm."""
    batch, tokens, heads, d = q.shape
    group = heads // k.shape[2]
    q1, k1, q2, k2 = lambda_vectors
    lam = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + lambda_init
    out = torch.zeros(batch, tokens, heads // 2, 2 * d, dtype=q.dtype)
    for b in range(batch):
        for i in range(heads // 2):
            j = i // group
            value = torch.cat((v[b, :, 2 * j], v[b, :, 2 * j + 1]), dim=-1)
            first = causal_map(q[b, :, 2 * i], k[b, :, 2 * j])
            second = causal_map(q[b, :, 2 * i + 1], k[b, :, 2 * j + 1])
            weights = first - lam * second
            out[b, :, i] = (clamp_and_renormalise(weights) if clamp else weights) @ value
    out = out if norm_weight is None else rms_norm(out, norm_weight, eps)
    return out * (1 - lambda_init)


def clamp_and_renormalise(weights):
    """Set negative weights (T, S) to 0 and scale rows to sum 1, or 0 without positive weights."""
    rows = []
    for row in weights:
        positive = torch.where(row > 0, row, torch.zeros_like(row))
        rows.append(positive / positive.sum() if (row > 0).any() else torch.zeros_like(row))
    return torch.stack(rows)


def lambda_init_schedule(layer_idx):
    return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)


def diff_v2(q, k, v, lam, shared_kv=True):
    """Return contexts (B, T, H, d); q has 2H heads, lam is broadcastable to (B, T, H)."""
    maps = standard(q, k, v)
    half = q.shape[2] // 2
    first, second = (
        (maps[:, :, 0::2], maps[:, :, 1::2])
        if shared_kv
        else (maps[:, :, :half], maps[:, :, half:])
    )
    return first - lam.unsqueeze(-1) * second


def rope(x, theta):
    """Rotate channels c and c + d/2 of x (B, T, H, d) by the angle t * theta^(-2c/d)."""
    _, tokens, _, d = x.shape
    out = torch.empty_like(x)
    for t in range(tokens):
        for c in range(d // 2):
            angle = t * theta ** (-2 * c / d)
            low, high = x[:, t, :, c], x[:, t, :, c + d // 2]
            out[:, t, :, c] = low * math.cos(angle) - high * math.sin(angle)
            out[:, t, :, c + d // 2] = high * math.cos(angle) + low * math.sin(angle)
    return out


# Functions below return contexts (B, T, heads, width) of q, k, v, layer input x, module and index.


def standard_context(q, k, v, x, weights, layer_idx):
    return standard(q, k, v)


def gated_context(width, scale=1.0):
    def context(q, k, v, x, weights, layer_idx):
        gate = (x @ weights.w_gate.weight.T).unflatten(-1, (-1, width or q.shape[-1]))
        return scale * gated(q, k, v, gate)

    return context


def diff_v1_context(constant=None, head_norm=True, clamp=False):
    def context(q, k, v, x, weights, layer_idx):
        vectors = [getattr(weights, f"lambda_{n}") for n in ("q1", "k1", "q2", "k2")]
        norm = weights.head_norm.weight if head_norm else None
        return diff_v1(q, k, v, vectors, constant or lambda_init_schedule(layer_idx), norm, clamp)

    return context


def diff_v2_context(lam=lambda x, weights: torch.sigmoid(x @ weights.w_lambda.weight.T), **how):
    def context(q, k, v, x, weights, layer_idx):
        return diff_v2(q, k, v, lam(x, weights), **how)

    return context


def diff_v2_head_norm_context(q, k, v, x, weights, layer_idx):
    context = diff_v2_context()(q, k, v, x, weights, layer_idx)
    return rms_norm(context, weights.head_norm.weight, 1e-5)


def scaled(factor, context):
    return lambda *args: factor * context(*args)


def constant_lambda(value):
    return lambda x, weights: torch.full((1, 1, 1), value, dtype=x.dtype)


REFERENCES = {
    "standard": standard_context,
    "standard_1p5x_heads": standard_context,
    "standard_2x_heads": standard_context,
    "standard_half_context": scaled(0.5, standard_context),
    "standard_quarter_context": scaled(0.25, standard_context),
    "standard_sink": lambda q, k, v, x, weights, layer_idx: standard(
        q, k, v, torch.exp(weights.sink)
    ),
    "standard_off_by_one": lambda q, k, v, x, weights, layer_idx: standard(
        q, k, v, torch.ones(q.shape[2], dtype=q.dtype)
    ),
    "gated": gated_context(width=None),
    "gated_headwise": gated_context(width=1),
    "gated_init_one": gated_context(width=None, scale=2.0),
    "diff_v1": diff_v1_context(),
    "diff_v1_clamped": diff_v1_context(clamp=True),
    "diff_v1_lambda_const": diff_v1_context(constant=0.8),
    "diff_v1_no_head_norm": diff_v1_context(head_norm=False),
    "diff_v2": diff_v2_context(),
    "diff_v2_2x_context": scaled(2.0, diff_v2_context()),
    "diff_v2_head_norm": diff_v2_head_norm_context,
    "diff_v2_lambda_fixed": diff_v2_context(constant_lambda(0.5)),
    "diff_v2_lambda_scalar": diff_v2_context(
        lambda x, weights: torch.sigmoid(weights.lambda_logit).view(1, 1, -1)
    ),
    "diff_v2_no_lambda": diff_v2_context(constant_lambda(1.0)),
    "diff_v2_no_sigmoid": diff_v2_context(lambda x, weights: x @ weights.w_lambda.weight.T),
    "diff_v2_unshared_kv": diff_v2_context(shared_kv=False),
}
