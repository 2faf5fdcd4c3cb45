"""Document boundaries, and the attention masks that kernels accept.

Shapes: B batch, n documents, T query tokens, S key tokens, H query heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from diffllm.model.attention.slices import Slices


class Documents(NamedTuple):
    """Position and document of each token in a batch (B, T), and the start of each document."""

    positions: Tensor
    """Position of each token in its document, from 0: (B, T) int64."""
    ids: Tensor
    """Index of each token's document in its sequence, from 0: (B, T) int64."""
    boundaries: Tensor
    """Start of each document among the B * T tokens of the batch, then B * T: (n + 1,) int32."""

    @classmethod
    def of(cls, tokens: Tensor, end: int) -> "Documents":
        """Find the documents in tokens (B, T) int64; each token equal to `end` ends a document.

        Each sequence starts a new document. The tokens must be on the CPU, because their values
        determine the shape of `boundaries`.
        """
        batch, length = tokens.shape
        starts = torch.ones_like(tokens, dtype=torch.bool)
        starts[:, 1:] = tokens[:, :-1] == end
        ids = starts.cumsum(1) - 1
        index = torch.arange(length, device=tokens.device).expand(batch, length)
        start_of_document = torch.where(starts, index, 0).cummax(1).values
        positions = index - start_of_document
        first_tokens = starts.flatten().nonzero().squeeze(1)
        n_tokens = first_tokens.new_tensor([batch * length])
        boundaries = torch.cat((first_tokens, n_tokens)).int()
        return cls(positions, ids, boundaries)

    def to(self, device: torch.device) -> "Documents":
        return Documents(
            moved(self.positions, device),
            moved(self.ids, device),
            moved(self.boundaries, device),
        )

    def visible_keys(self) -> Tensor:
        """Return the number of query-key pairs in the batch that `mask` allows: an int64 scalar."""
        lengths = self.boundaries.diff().long()
        return (lengths * (lengths + 1) // 2).sum()

    def mask(self) -> Tensor:
        """Return the attention mask, (B, 1, T, T) boolean.

        An entry is True if the key is in the document of the query and not after the query.
        """
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.ids.device)
        causal = causal.tril()  # (T, T)
        ids_of_queries = self.ids[:, :, None]
        ids_of_keys = self.ids[:, None, :]
        is_same_document = ids_of_queries == ids_of_keys  # (B, T, T)
        return (is_same_document & causal).unsqueeze(1)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    # A copy to a GPU is asynchronous only from pinned memory.
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Packed(NamedTuple):
    """Boundaries of the documents in a batch, and an upper bound on the document length."""

    boundaries: Tensor
    """Start of each document among the B * T tokens, then B * T: (n + 1,) int32."""
    longest: int
    """Upper bound on the length of a document, in tokens."""


WholeMask = Tensor | Packed | BlockMask | None
"""The keys that a query sees. None: causal. A boolean tensor, broadcastable to (B, H, T, S): True
for visible keys. `Packed` and `BlockMask`: causal within documents."""


class Sliced(NamedTuple):
    """The mask of whole sequences of which this rank has a slice."""

    mask: WholeMask
    slices: Slices


Mask = WholeMask | Sliced
