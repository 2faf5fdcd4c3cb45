"""The one place that calls an attention kernel.

Shapes: B batch, T query tokens, S key tokens, H query heads, K kv heads, d width of q and k,
dv width of v.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

NARROW = 32
"""Head width up to which the fused CPU kernel trains faster in float32 than in bf16
(forward and backward at 256 to 1024 tokens: 1.5 to 1.0 times; at 64 and more, slower)."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(q k / sqrt(d)) v, causal unless `mask` says otherwise.

    Args:
        q: (B, T, H, d). k: (B, S, K, d). v: (B, S, K, dv). Query head h reads kv head h // (H/K).
        mask: boolean, True where a query may look, broadcastable to (B, H, T, S). None is causal,
            the last query aligned with the last key.

        scale: of q k; d^-0.5 by default.

    Returns:
        (B, T, H, dv) in the dtype of q.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    d, dv, n_queries, n_keys = q.shape[-1], v.shape[-1], q.shape[1], k.shape[1]
    dtype = q.dtype
    if q.device.type == "cpu":
        if dv > d:
            # The fused CPU kernel takes one width only; zeros add nothing to q k, and the unfused
            # path costs three times as much.
            q, k = F.pad(q, (0, dv - d)), F.pad(k, (0, dv - d))
        if dv <= NARROW and dtype == torch.bfloat16:
            q, k, v = q.float(), k.float(), v.float()
    causal = mask is None and n_queries == n_keys
    if mask is None and 1 < n_queries < n_keys:
        mask = causal_lower_right(n_queries, n_keys)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).to(dtype)


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The explicit map softmax(q k / sqrt(d)), (B, H, T, S), in float32 or wider.

    Arguments as for `attend`. Memory grows with T * S: for teaching, tests and figures.
    """
    n_queries, n_keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(group, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q.to(dtype), k.to(dtype)) * scale
    if mask is None:
        visible = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device)
        mask = visible.tril(n_keys - n_queries)
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """weights (B, H, T, S) times v (B, S, K, dv) -> (B, T, H, dv), in the dtype of weights."""
    v = v.repeat_interleave(weights.shape[1] // v.shape[2], dim=2)
    return torch.einsum("bhts,bshd->bthd", weights, v.to(weights.dtype))
