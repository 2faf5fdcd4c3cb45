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
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


# These are custom operations because a compiled graph has no loop over any number of documents.


@torch.library.custom_op("diffllm::document_attention", mutates_args=())
def document_attention(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each document: (N, H, d) in the dtype of q.

    Also return the logarithm of the softmax denominator of each query, (H, N), in float32 or wider.

    Args:
        q, k, v: (N, H, d) each, in one dtype.
        boundaries: start of each document among the N tokens, then N: (n + 1,) int32.
        scale: factor on the products of queries and keys.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    logsumexp = q.new_empty((q.shape[1], len(q)), dtype=sum_dtype)
    for (*parts, out_part), rows in documents((q, k, v, out), boundaries):
        result, sums = FORWARD(*parts, 0.0, True, scale=scale)
        out_part.copy_(result)
        logsumexp[:, rows] = sums[0]
    return out, logsumexp


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
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    for parts, rows in documents((grad, q, k, v, out, *grads), boundaries):
        inputs, grad_parts = parts[:5], parts[5:]
        results = BACKWARD(*inputs, logsumexp[None, :, rows], 0.0, True, scale=scale)
        for grad_part, values in zip(grad_parts, results, strict=True):
            grad_part.copy_(values)
    return grads[0], grads[1], grads[2]


def documents(
    tensors: tuple[Tensor, ...], boundaries: Tensor
) -> Iterator[tuple[list[Tensor], slice]]:
    """For each document, yield views (1, H, tokens, d) of the `tensors` (N, H, d), and its rows."""
    for start, end in pairwise(boundaries.tolist()):
        rows = slice(start, end)
        yield [x[rows].transpose(0, 1).unsqueeze(0) for x in tensors], rows


@document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    sums = q.new_empty((q.shape[1], len(q)), dtype=sum_dtype)
    return v.new_empty(v.shape), sums


@document_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, boundaries, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, boundaries)


def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, boundaries = ctx.saved_tensors
    # The kernel needs contiguous channels.
    grads = document_attention_backward(grad.contiguous(), *saved, boundaries, ctx.scale)
    return (*grads, None, None)


document_attention.register_autograd(backward, setup_context=keep)
