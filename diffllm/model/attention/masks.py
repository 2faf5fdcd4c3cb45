"""What a training forward pass tells `ops.attend` about who sees whom: made once, for all layers.

Shapes: B batch, T tokens.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from diffllm.model.attention.kernels import Kernel, training_kernel
from diffllm.model.attention.ops import Backend, Mask, Packed
from diffllm.model.documents import Documents

PACKED = (Kernel.varlen, Kernel.varlen_2, Kernel.varlen_4)


def training_mask(
    documents: Documents | None,
    tokens: Tensor,
    backend: Backend,
    dtype: torch.dtype,
    width: int,
    explicit: bool = False,
) -> Mask:
    """What `attend` wants for a batch: made once, used by every layer.

    Args:
        documents: None where a row is one document.
        tokens: (B, T), of which shape and device count.
        dtype: of queries and keys.
        width: of the widest of queries, keys and values.
        explicit: documents as a boolean tensor even where there are kernels for them.
    """
    length, device = tokens.shape[1], tokens.device
    masked = documents is not None
    kernel = training_kernel(backend, device, dtype, width, masked, explicit).value
    if documents is None:
        return causal_blocks(length, device) if kernel is Kernel.flex else None
    if kernel is Kernel.flex:
        return document_blocks(documents.ids)
    return packed(documents, length) if kernel in PACKED else documents.mask()


def packed(documents: Documents, length: int) -> Packed:
    """Documents of rows of `length` tokens, for kernels that want where each begins.

    No batch has as many documents as the last one, and none may compile a graph for itself: their
    number is dynamic, and the longest document is said to be a row.
    """
    torch._dynamo.maybe_mark_dynamic(documents.boundaries, 0)
    return Packed(documents.boundaries, length)


@functools.lru_cache(maxsize=8)
def causal_blocks(length: int, device: torch.device) -> BlockMask:
    """Causal, for every row and head."""

    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return block_mask_maker(device)(causal, None, None, length, length, device=device)


def document_blocks(ids: Tensor) -> BlockMask:
    """Causal within documents: ids (B, T), the same for every head."""
    batch, length = ids.shape

    def within(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids[b, query] == ids[b, key])

    return block_mask_maker(ids.device)(within, batch, None, length, length, device=ids.device)


@functools.lru_cache(maxsize=8)
def block_mask_maker(device: torch.device) -> Callable[..., BlockMask]:
    """Compiled on GPUs: it would otherwise make several masks of T * T on the way."""
    return torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
