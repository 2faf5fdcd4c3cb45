"""All calls of attention kernels.

Shapes: B batch, T query tokens, S key tokens, H query heads, K key heads, Kv value heads (Kv = K if
not mentioned), d width of a query or key head, dv width of a value head.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from diffllm.core.torch_versions import CPU_CAPABILITIES, VARLEN_GQA
from diffllm.model.attention.cpu_documents import document_attention
from diffllm.model.attention.masks import Mask, Packed, Sliced

NARROW = 32
"""Largest head width at which float32 is faster than bf16 in the fused kernel, on CPUs with fast
bf16. Forward and backward at 256 to 1024 tokens: 1.5 to 1.0 times; from width 64, slower."""
IS_INTEL = "Intel" in str(CPU_CAPABILITIES.get("cpu_name"))
HAS_AMX = bool(CPU_CAPABILITIES.get("amx_bf16"))
SLOW_BF16 = IS_INTEL and not HAS_AMX
"""Whether bf16 products take twice as long as float32 products (Intel CPUs without AMX). If so, the
fused kernel is faster in float32 at all tested head widths (64 to 256: 1.4 to 2 times)."""

HALF_PRECISION = (torch.bfloat16, torch.float16)
WIDEST = 256
"""Largest head width of FlashAttention kernels."""
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FLASH_4 = "diffllm.model.flash_attention_4"
"""Module of flash-attn-4 for torch's dispatcher, and its registered name."""


class Backend(Enum):
    """The attention kernel for training.

    sdpa: torch's scaled_dot_product_attention, on any device.
    flash: the flash-attn package, version 4 on Hopper and Blackwell if installed, otherwise 2.
    flex: compiled FlexAttention, on GPUs only.
    reference: explicit attention maps, for tests and figures; memory grows with T * S.
    """

    sdpa = "sdpa"
    flash = "flash"
    flex = "flex"
    reference = "reference"


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = None,
    backend: Backend = Backend.sdpa,
    scale: float | None = None,
) -> Tensor:
    """Compute attention, softmax(scale * q k) v; return (B, T, H, dv) in the dtype of q.

    Query head h uses key head j = h // (H / K) and value head j % Kv. In DIFF V1, Kv may be K / 2.

    Args:
        q: (B, T, H, d). k: (B, S, K, d). v: (B, S, Kv, dv), where Kv divides K.
        mask: see `Mask`. Without a mask, query t sees the keys 0 to S - T + t.
        backend: `reference` computes explicit attention maps. All other backends use SDPA if the
            mask is a tensor, or if T = 1 and there is no mask.
        scale: factor on q k; None means 1 / sqrt(d).
    """
    if isinstance(mask, Sliced):
        # The ranks exchange heads around the kernel, so the kernel gets whole sequences.
        kernel = functools.partial(attend, mask=mask.mask, backend=backend, scale=scale)
        return mask.slices.around(kernel, q, k, v)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if backend is Backend.reference:
        assert not isinstance(mask, (Packed, BlockMask))
        weights = attention_weights(q, k, mask, scale)
        context = weighted(weights, repeated(v, k))
        return context.to(q.dtype)
    if q.shape[1] == 1 and (mask is None or (isinstance(mask, Tensor) and for_all_heads(mask))):
        return one_query(q, k, v, mask, scale)
    v = repeated(v, k)
    if isinstance(mask, BlockMask):
        return flex(q, k, v, mask, scale)
    if isinstance(mask, Packed):
        packed_attention = varlen_on_cpu if q.device.type == "cpu" else varlen
        return packed_attention(q, k, v, mask, scale, backend)
    if backend is Backend.flash and mask is None:
        return flash(q, k, v, scale)
    return sdpa(q, k, v, mask, scale)


def repeated(v: Tensor, k: Tensor) -> Tensor:
    """Repeat the heads of v until v has as many heads as k, in the order h1, h2, h1, h2."""
    times = k.shape[2] // v.shape[2]
    if times == 1:
        return v
    return v.repeat(1, 1, times, 1)


def for_all_heads(mask: Tensor) -> bool:
    return mask.ndim < 3 or mask.shape[-3] == 1


def same_width(q: Tensor, k: Tensor, v: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the last dimension of q, k and v with zeros to one width, which `multiple` divides.

    The zeros do not change the products of queries and keys. The attention output has the padded
    width; its channels after the first dv are zero.
    """
    widest = max(q.shape[-1], v.shape[-1])
    width = -(-widest // multiple) * multiple  # rounded up
    return padded(q, width), padded(k, width), padded(v, width)


def padded(heads: Tensor, width: int) -> Tensor:
    missing = width - heads.shape[-1]
    if missing == 0:
        return heads
    return F.pad(heads, (0, missing))


def in_float32(dtype: torch.dtype, width: int) -> bool:
    return dtype == torch.bfloat16 and (SLOW_BF16 or width <= NARROW)


def flash_takes(dtype: torch.dtype, width: int) -> bool:
    return dtype in HALF_PRECISION and width <= WIDEST


def sdpa_for_any_length(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that disables cuDNN attention on a GPU and does nothing elsewhere.

    cuDNN would compile a plan for each sequence length. Entering the context takes about 25 us, so
    enter the context once per forward pass of the model.
    """
    return sdpa_kernel(WITHOUT_CUDNN) if device.type == "cuda" else nullcontext()


def cudnn_takes(dtype: torch.dtype, heads: int, groups: int, d: int, dv: int) -> bool:
    """Return whether torch's SDPA runs cuDNN's causal kernel for values wider than the keys.

    Other kernels need equal widths. The choice does not depend on the length of the sequences, so
    the length is no argument: torch.compile may trace it as a symbol.

    Args:
        heads: number of query heads, with width `d`.
        groups: number of key heads, with width `d`, and of value heads, with width `dv`.
    """
    if not torch.cuda.is_available():
        return False
    empty = functools.partial(torch.empty, dtype=dtype, device="cuda", requires_grad=True)
    q = empty(1, heads, 128, d)
    k = empty(1, groups, 128, d)
    v = empty(1, groups, 128, dv)
    choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=heads != groups)
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


# torch.compiler.assume_constant_result sets this attribute, but loads the compiler: 1 s.
cudnn_takes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention with torch's SDPA; for the arguments, see `attend`."""
    dtype = q.dtype
    n_queries, heads, d = q.shape[1:]
    n_keys, groups = k.shape[1:3]
    dv = v.shape[-1]
    if q.device.type == "cpu":
        # With unequal widths, SDPA takes the unfused path, which is three times slower.
        q, k, v = same_width(q, k, v)
        if in_float32(dtype, v.shape[-1]):
            q = q.float()
            k = k.float()
            v = v.float()
    elif mask is None and flash_takes(dtype, max(d, dv)):
        is_narrow = d < dv and n_queries == n_keys
        if not (is_narrow and cudnn_takes(dtype, heads, groups, d, dv)):
            # FlashAttention needs equal widths, but supports grouped heads.
            q, k, v = same_width(q, k, v)
    elif heads != groups:
        # The memory-efficient kernel needs one key head per query head.
        k = k.repeat_interleave(heads // groups, 2)
        v = v.repeat_interleave(heads // v.shape[2], 2)
    is_causal = False
    # `if` turns a symbol of torch.compile into a bool.
    if mask is None and n_queries == n_keys:
        is_causal = True
    elif mask is None and n_queries < n_keys:
        from torch.nn.attention.bias import causal_lower_right  # loads the compiler: 1 s

        mask = causal_lower_right(n_queries, n_keys)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    out = out.transpose(1, 2)  # (B, T, H, dv), or wider
    return out[..., :dv].to(dtype)


def one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention for one query per sequence (T = 1); for the arguments, see `attend`.

    To avoid copies of keys, the query heads that share a key head are passed to SDPA as several
    queries of one head. If there are more key heads than value heads, SDPA is called several times,
    each time with as many key heads as value heads.
    """
    batch, _, heads, d = q.shape
    key_heads, value_heads = k.shape[2], v.shape[2]
    grouped = q.view(batch, key_heads, heads // key_heads, d)
    values = v.transpose(1, 2)
    query_parts = grouped.split(value_heads, 1)
    key_parts = k.transpose(1, 2).split(value_heads, 1)
    contexts = []
    for queries, keys in zip(query_parts, key_parts, strict=True):
        context = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        contexts.append(context)
    return torch.cat(contexts, dim=1).view(batch, 1, heads, v.shape[-1])


def sdpa_is_flash_4() -> bool:
    return torch.nn.attention.current_flash_attention_impl() == FLASH_4


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention with the flash-attn package; for the arguments, see `attend`."""
    dv = v.shape[-1]
    q, k, v = same_width(q, k, v, multiple=8)
    if sdpa_is_flash_4():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(q, k, v, None, scale)[..., :dv]
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, softmax_scale=scale, causal=True)[..., :dv]


def varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: Packed, scale: float, backend: Backend
) -> Tensor:
    """Compute causal attention within each document with a kernel for variable lengths.

    `documents` contains the document boundaries. For q, k, v, scale and backend, see `attend`.
    """
    shape = q.shape[:3]
    dv = v.shape[-1]
    q, k, v = same_width(q, k, v, multiple=8)
    q = q.flatten(0, 1)  # (B T, H, width)
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    # Queries and keys have the same documents.
    bounds = (documents.boundaries, documents.boundaries)
    lengths = (documents.longest, documents.longest)
    if backend is Backend.flash and not sdpa_is_flash_4():
        from flash_attn import flash_attn_varlen_func

        out = flash_attn_varlen_func(q, k, v, *bounds, *lengths, softmax_scale=scale, causal=True)
    else:
        from torch.nn.attention.varlen import varlen_attn  # loads the compiler: 1 s

        options = {"scale": scale, "window_size": (-1, 0), **VARLEN_GQA}
        # torch 2.15 prefers cuDNN, which compiles and keeps a plan per number of documents.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = varlen_attn(q, k, v, *bounds, *lengths, **options)
    out = out.view(*shape, -1)
    return out[..., :dv]


def varlen_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, documents: Packed, scale: float, backend: Backend
) -> Tensor:
    """Compute causal attention within each document on a CPU; for the arguments, see `varlen`."""
    dtype = q.dtype
    shape = q.shape[:3]
    dv = v.shape[-1]
    q, k, v = same_width(q, k, v)
    q = q.flatten(0, 1)  # (B T, H, width)
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    if in_float32(dtype, v.shape[-1]):
        q = q.float()
        k = k.float()
        v = v.float()
    # `document_attention` needs one key head and one value head per query head.
    heads = q.shape[1]
    k = k.repeat_interleave(heads // k.shape[1], 1)
    v = v.repeat_interleave(heads // v.shape[1], 1)
    out, _ = document_attention(q, k, v, documents.boundaries, scale)
    out = out.view(*shape, -1)
    return out[..., :dv].to(dtype)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Compute attention with FlexAttention; for the arguments, see `attend`.

    FlexAttention is compiled, because the uncompiled function stores all T * S attention weights.
    """
    kernel: Any = flex_attention if torch.compiler.is_compiling() else compiled_flex()
    out: Tensor = kernel(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Compute the attention map softmax(scale * q k), (B, H, T, S), in float32 or wider.

    For the arguments, see `attend`. Memory grows with T * S.
    """
    n_queries, n_keys = q.shape[1], k.shape[1]
    if mask is None:
        mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device)
        mask = mask.tril(n_keys - n_queries)
    scores = attention_scores(q, k, scale)
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1)


def attention_scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Compute the attention logits scale * q k, (B, H, T, S), in float32 or wider.

    By default, `scale` is 1 / sqrt(d).
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    dtype = at_least_float32(q.dtype)
    # One dimension of key heads and one of the query heads that share a key head: (B, T, K, g, d).
    grouped = q.unflatten(2, (k.shape[2], -1))
    products = torch.einsum("btkgd,bskd->bkgts", grouped.to(dtype), k.to(dtype))
    return products.flatten(1, 2) * scale


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """Multiply attention weights (B, H, T, S) by v (B, S, K, dv).

    The result is (B, T, H, dv), in the dtype of `weights`. H / K consecutive query heads share one
    value head.
    """
    group_size = weights.shape[1] // v.shape[2]
    v = v.repeat_interleave(group_size, dim=2)
    return torch.einsum("bhts,bshd->bthd", weights, v.to(weights.dtype))
