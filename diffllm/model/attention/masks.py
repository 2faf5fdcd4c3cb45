"""The masks of training forward passes, in the form that the chosen kernel wants.

Shapes: B batch, T tokens.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from diffllm.model.attention.kernels import Kernel
from diffllm.model.attention.ops import Mask, Packed
from diffllm.model.documents import Documents

PACKED = (Kernel.varlen, Kernel.varlen_2, Kernel.varlen_4)


def training_mask(kernel: Kernel, documents: Documents | None, tokens: Tensor) -> Mask:
    """Build the mask of a batch in the form that `kernel` takes; one mask serves all layers.

    `documents` are None where a row is one; of tokens (B, T) only shape and device count.
    """
    length = tokens.shape[1]
    if documents is None:
        return causal_blocks(length, tokens.device) if kernel is Kernel.flex else None
    if kernel is Kernel.flex:
        return document_blocks(documents.ids)
    if kernel not in PACKED:
        return documents.mask()
    # The number of documents differs from batch to batch, and must not compile a graph for each:
    # it is marked as dynamic, and every batch says that its longest document is a whole row.
    torch._dynamo.maybe_mark_dynamic(documents.boundaries, 0)
    return Packed(documents.boundaries, length)


@functools.lru_cache(maxsize=8)
def causal_blocks(length: int, device: torch.device) -> BlockMask:
    """Build the causal block mask that every row and head shares."""

    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return block_mask_maker(device)(causal, None, None, length, length, device=device)


def document_blocks(ids: Tensor) -> BlockMask:
    """Build the causal mask within documents for every head; ids (B, T) as in `Documents`."""
    batch, length = ids.shape

    def within(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids[b, query] == ids[b, key])

    return block_mask_maker(ids.device)(within, batch, None, length, length, device=ids.device)


@functools.lru_cache(maxsize=8)
def block_mask_maker(device: torch.device) -> Callable[..., BlockMask]:
    """Return `create_block_mask`, compiled on GPUs, where it would make several T * T masks."""
    return torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
