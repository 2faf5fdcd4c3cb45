"""The sequences of a packed source.

Shapes: T sequence length, m sequences that are read at once.
"""

import numpy as np
import torch

from diffllm.data.packing.plan import Plan
from diffllm.data.sequences import Batch
from diffllm.data.shards import Stream, as_targets


class PackedSequences:
    """Whole documents, several in a sequence, in the order of the corpus; the rest is padding.

    A token's input is the token before it: the EOS before its document for a first one. So every
    token is a target once, unless it is only context. Padding has EOS as inputs and -1 as targets.
    """

    def __init__(self, stream: Stream, eos_id: int, seq_len: int, plan: Plan) -> None:
        self.stream, self.eos_id, self.seq_len, self.plan = stream, eos_id, seq_len, plan

    def __len__(self) -> int:
        return self.plan.counts.sequences

    def read(self, places: np.ndarray) -> Batch:
        """Read the sequences at `places` (m,)."""
        inputs = np.full((len(places), self.seq_len), self.eos_id, np.int64)
        targets = np.full_like(inputs, -1)
        for row, place in enumerate(places.tolist()):
            at = 0
            for start, length in self.plan[place]:
                self.plan.require(0 <= start < start + length <= len(self.stream))
                tokens = self._from_before(start, start + length)
                if tokens[0] != self.eos_id and length < self.seq_len:
                    at += 1  # the end of a document that was cut; an EOS parts it from the last one
                self.plan.require(at + length <= self.seq_len)
                inputs[row, at : at + length] = tokens[:-1]
                targets[row, at : at + length] = as_targets(self.stream, start, tokens[1:])
                at += length
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _from_before(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start - 1, stop), (stop - start + 1,) int64; an EOS is before the first."""
        if start:
            return self.stream.tokens(start - 1, stop)
        return np.append(self.eos_id, self.stream.tokens(start, stop))
