"""Sequences of tokens, read in any order, and those that are cut from a stream.

Shapes: T sequence length, m sequences that are read at once.
"""

from typing import Protocol

import numpy as np
import torch

from diffllm.core.bounds import check_counts
from diffllm.core.errors import DataError
from diffllm.data.shards import Stream

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, (m, T) int64 each; negative targets are ignored."""


class Sequences(Protocol):
    """The sequences of a pass over a source, which can be read at any place."""

    def __len__(self) -> int:
        """Count them; at least 1."""

    def read(self, places: np.ndarray) -> Batch:
        """Read inputs and targets, (m, T) int64 each, of places (m,); raises DataError."""


class StreamSequences:
    """The sequences that a stream is cut into wherever T tokens are full."""

    def __init__(self, stream: Stream, seq_len: int) -> None:
        """Count the sequences; raises as `sequences_in`."""
        self.stream, self.seq_len = stream, seq_len
        self.count = sequences_in(stream, seq_len)

    def __len__(self) -> int:
        return self.count

    def read(self, places: np.ndarray) -> Batch:
        return read_sequences(self.stream, self.seq_len, places)


def sequences_in(stream: Stream, seq_len: int) -> int:
    """Count the sequences of seq_len inputs, and a target each, that `stream` holds; raises
    DataError if there is not even one, ConfigError for a length that cannot be."""
    check_counts(least=1, seq_len=seq_len)
    n = (len(stream) - 1) // seq_len
    if n < 1:
        raise DataError(
            f"the corpus is shorter than one sequence: its {stream.split} split has "
            f"{len(stream)} tokens, seq_len={seq_len} needs {seq_len + 1}"
        )
    return n


def read_sequences(stream: Stream, seq_len: int, places: np.ndarray) -> Batch:
    """Read inputs and targets, (m, T) int64 each, at places (m,): sequence i starts at token i *
    T."""
    starts = [i * seq_len for i in places.tolist()]
    rows = [stream.tokens(start, start + seq_len + 1) for start in starts]
    tokens = torch.from_numpy(np.stack(rows))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if stream.masked:
        masks = [stream.loss_mask(start + 1, start + seq_len + 1) for start in starts]
        # In place it would change the inputs as well: both are views where there is one sequence.
        targets = targets.masked_fill(torch.from_numpy(~np.stack(masks)), -1)
    return inputs, targets
