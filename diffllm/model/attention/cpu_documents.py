"""Causal attention within documents on CPUs: torch's fused kernel, called for each document.

Neither pass stores a mask or a map, so memory grows linearly with the number of tokens. Attention
FLOPs are only those of visible keys.

Shapes: N tokens of all sequences of a batch, n documents, H heads, d width of a head.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten
FLASH_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


# These are custom operations because a compiled graph has no loop over any number of documents.


@torch.library.custom_op("diffllm::document_attention", mutates_args=())
def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each document: (N, H, d) in the dtype of q.

    Also return the logarithm of the softmax denominator of each query, (H, N), in float32 or wider.

    Args:
        q, k, v: (N, H, d) each, in one dtype.
        boundaries: start of each document among the N tokens, then N: (n + 1,) int32.
        scale: factor on the products of queries and keys.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    logsumexp = empty_logsumexp(q)
    for views, rows in documents((q, k, v, out), boundaries):
        *inputs, out_view = views
        context, sums = FLASH_FORWARD(*inputs, 0.0, True, scale=scale)
        out_view.copy_(context)
        logsumexp[:, rows] = sums[0]
    return out, logsumexp


def empty_logsumexp(q: Tensor) -> Tensor:
    n_tokens, heads, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((heads, n_tokens), dtype=dtype)


@torch.library.custom_op("diffllm::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    boundaries: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `out` and `logsumexp` are the results of the forward."""
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k = torch.empty_like(k, memory_format=torch.contiguous_format)
    grad_v = torch.empty_like(v, memory_format=torch.contiguous_format)
    tensors = (grad, q, k, v, out, grad_q, grad_k, grad_v)
    for views, rows in documents(tensors, boundaries):
        inputs = views[:5]
        grad_views = views[5:]
        sums = logsumexp[None, :, rows]
        grads = FLASH_BACKWARD(*inputs, sums, 0.0, True, scale=scale)
        for grad_view, values in zip(grad_views, grads, strict=True):
            grad_view.copy_(values)
    return grad_q, grad_k, grad_v


def documents(
    tensors: tuple[Tensor, ...], boundaries: Tensor
) -> Iterator[tuple[list[Tensor], slice]]:
    """For each document, yield views (1, H, tokens, d) of the `tensors` (N, H, d), and its rows."""
    for start, end in pairwise(boundaries.tolist()):
        rows = slice(start, end)
        views = []
        for tensor in tensors:
            view = tensor[rows].transpose(0, 1)  # (H, tokens, d)
            views.append(view.unsqueeze(0))
        yield views, rows


@document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out = v.new_empty(v.shape)
    return out, empty_logsumexp(q)


@document_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    grad_q = q.new_empty(q.shape)
    grad_k = k.new_empty(k.shape)
    grad_v = v.new_empty(v.shape)
    return grad_q, grad_k, grad_v


def save_tensors(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, boundaries, ctx.scale = inputs
    out, logsumexp = output
    ctx.save_for_backward(q, k, v, out, logsumexp, boundaries)


def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    # The kernel needs contiguous channels.
    grad = grad.contiguous()
    grads = document_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*grads, None, None)


document_attention.register_autograd(backward, setup_context=save_tensors)
