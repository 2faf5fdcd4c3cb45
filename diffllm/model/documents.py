"""Where the documents of packed rows begin.

Shapes: B batch, T tokens, n documents.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """The documents of a batch whose rows are cut from one stream of documents."""

    positions: Tensor
    """Of each token in its document, (B, T) int64."""
    ids: Tensor
    """Which document of its row a token belongs to, (B, T) int64."""
    boundaries: Tensor
    """Where documents start among the B * T tokens of all rows, and B * T: (n + 1,) int32."""

    @classmethod
    def of(cls, tokens: Tensor, end: int) -> "Documents":
        """Documents end with the token `end`; rows begin and end with parts of one.

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
        """On another device, without anyone waiting."""
        return Documents(*(moved(part, device) for part in self))

    def mask(self) -> Tensor:
        """(B, 1, T, T) boolean: True where a query sees a key, in its document and not after it."""
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()
        return ((self.ids[:, :, None] == self.ids[:, None, :]) & causal).unsqueeze(1)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on another device; a GPU reads pinned memory, so nobody waits."""
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)
