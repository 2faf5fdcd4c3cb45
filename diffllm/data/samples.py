"""The samples of training by their global number, in an order that the seed decides.

Shapes: T sequence length, m micro batch (sequences a rank and micro-step), n sequences in a stream.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from diffllm.data.permutation import permute
from diffllm.data.shards import Stream
from diffllm.errors import CheckpointError, DataError

Batch = tuple[torch.Tensor, torch.Tensor]


def sequences_in(stream: Stream, seq_len: int) -> int:
    """Count the sequences of seq_len inputs, and a target each, that `stream` holds; raises
    DataError if there is not even one."""
    n = (len(stream) - 1) // seq_len
    if n < 1:
        raise DataError(
            f"the corpus is shorter than one sequence: its {stream.split} split has "
            f"{len(stream)} tokens, seq_len={seq_len} needs {seq_len + 1}"
        )
    return n


def read_sequences(stream: Stream, seq_len: int, samples: np.ndarray) -> Batch:
    """Read inputs and targets, (m, T) int64 each, of samples (m,): sample i starts at token i *
    T."""
    rows = [stream.tokens(i * seq_len, (i + 1) * seq_len + 1) for i in samples.tolist()]
    tokens = torch.from_numpy(np.stack(rows))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Samples(Protocol):
    """All samples that a run may read; a pure function of their numbers, which have no end."""

    def __getitem__(self, samples: range) -> Batch | DataError:
        """Return (inputs, targets), (m, T) int64 each, or the error: a worker would wrap it."""

    def consumed(self, sample: int) -> dict[str, float]:
        """Say what has been read before a sample, as metrics."""

    def state(self, sample: int) -> dict[str, Any]:
        """Describe the place before a sample, as JSON values."""

    def sample_of(self, state: dict[str, Any]) -> int:
        """Return the sample that a state stands before, and go on in its order; raises
        CheckpointError for one of other samples."""


class ShuffledSequences(Dataset[Batch | DataError]):
    """The sequences of a stream: sample g is sequence `permute(g % n)` of epoch g // n."""

    def __init__(self, stream: Stream, seq_len: int, seed: int) -> None:
        """Count the sequences; raises as `sequences_in`."""
        self.stream, self.seq_len, self.seed = stream, seq_len, seed
        self.sequences = sequences_in(stream, seq_len)

    def __getitem__(self, samples: range) -> Batch | DataError:
        """Return (inputs, targets) of samples, or the error."""
        places = shuffled(np.asarray(samples, np.int64), self.sequences, self.seed)
        try:
            return read_sequences(self.stream, self.seq_len, places)
        except DataError as error:
            return error

    def consumed(self, sample: int) -> dict[str, float]:
        """Say nothing: steps and tokens are known."""
        return {}

    def state(self, sample: int) -> dict[str, Any]:
        """Describe the place before a sample: seed, epoch, and sample of the epoch."""
        epoch, within = divmod(sample, self.sequences)
        return {"seed": self.seed, "epoch": epoch, "sample": within}

    def sample_of(self, state: dict[str, Any]) -> int:
        """Return the sample that a state stands before; raises CheckpointError if it belongs to
        another seed, corpus or sequence length."""
        check_seed(state, self.seed)
        if state["sample"] >= self.sequences:
            raise CheckpointError(
                f"the checkpoint stands at sequence {state['sample']} of an epoch, but this corpus "
                f"has {self.sequences}: it was saved with another corpus or seq_len"
            )
        return state["epoch"] * self.sequences + state["sample"]


def shuffled(samples: np.ndarray, sequences: int, seed: int | str) -> np.ndarray:
    """Return the sequence of each sample (m,), each epoch in an order of its own."""
    epochs, positions = np.divmod(samples, sequences)
    places = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        places[here] = permute(positions[here], sequences, seed, epoch)
    return places


def check_seed(state: dict[str, Any], seed: int) -> None:
    """Raise CheckpointError for the place of another seed's order."""
    if state["seed"] != seed:
        raise CheckpointError(
            f"the checkpoint's data order has seed={state['seed']}, this run seed={seed}"
        )
