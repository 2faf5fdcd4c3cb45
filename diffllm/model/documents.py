"""The documents of packed rows: where each begins, and which tokens see each other.

Shapes: B batch, T tokens, n documents.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """The documents of a batch whose rows are cut from one stream of documents."""

    positions: Tensor
    """Position of each token in its document, (B, T) int64."""
    ids: Tensor
    """Index of each token's document in its row, (B, T) int64."""
    boundaries: Tensor
    """Start of each document among the B * T tokens of all rows, then B * T: (n + 1,) int32."""

    @classmethod
    def of(cls, tokens: Tensor, end: int) -> "Documents":
        """Find documents, which end with the token `end`; rows begin and end with parts of one.

        tokens (B, T) int64; on the CPU, because the number of documents is needed.
        """
        batch, length = tokens.shape
        starts = torch.ones_like(tokens, dtype=torch.bool)
        starts[:, 1:] = tokens[:, :-1] == end
        ids = starts.cumsum(1) - 1
        index = torch.arange(length, device=tokens.device).expand(batch, length)
        positions = index - torch.where(starts, index, 0).cummax(1).values
        first = starts.flatten().nonzero().squeeze(1)
        boundaries = torch.cat((first, first.new_tensor([batch * length]))).int()
        return cls(positions, ids, boundaries)

    def to(self, device: torch.device) -> "Documents":
        """Copy to another device, without a wait on the host."""
        return Documents(*(moved(part, device) for part in self))

    def mask(self) -> Tensor:
        """Return (B, 1, T, T) bool: True where a query sees a key of its document, not later."""
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()
        return ((self.ids[:, :, None] == self.ids[:, None, :]) & causal).unsqueeze(1)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; a GPU reads pinned memory, so the host does not wait."""
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)
