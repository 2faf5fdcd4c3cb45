"""The samples of training by their global number, in an order that the seed decides.

Shapes: T sequence length, m micro batch (sequences a rank and micro-step), n sequences of a source.
"""

from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from diffllm.core.errors import CheckpointError, DataError
from diffllm.data.mixture.place import MOST
from diffllm.data.permutation import permute
from diffllm.data.sequences import Batch, Sequences


class Samples(Protocol):
    """All samples that a run may read; a pure function of their numbers, which have no end."""

    def __getitem__(self, samples: range) -> Batch | DataError:
        """Return (inputs, targets), (m, T) int64 each, or the error: a worker would wrap it."""

    def consumed(self, sample: int) -> dict[str, float]:
        """Say what has been read before a sample, as metrics."""

    def bits_per_nat(self, sample: int) -> float | None:
        """Return the bits per byte that equal 1 nat per token, from split means weighted by the
        tokens read before `sample`; None if the text is unknown."""

    def state(self, sample: int) -> dict[str, Any]:
        """Describe the place before a sample, as JSON values."""

    def sample_of(self, state: dict[str, Any]) -> int:
        """Return the sample that a state stands before, and go on in its order; raises
        CheckpointError for one of other samples."""


class ShuffledSequences(Dataset[Batch | DataError]):
    """The sequences of a source: sample g is sequence `permute(g % n)` of epoch g // n.

    Args:
        bits: bits per byte of the source's text that equal 1 nat per token, if known.
    """

    def __init__(self, sequences: Sequences, seed: int, bits: float | None = None) -> None:
        self.sequences, self.seed, self.bits = sequences, seed, bits

    def __getitem__(self, samples: range) -> Batch | DataError:
        """Return (inputs, targets) of samples, or the error."""
        places = shuffled(np.asarray(samples, np.int64), len(self.sequences), self.seed)
        try:
            return self.sequences.read(places)
        except DataError as error:
            return error

    def consumed(self, sample: int) -> dict[str, float]:
        return {}

    def bits_per_nat(self, sample: int) -> float | None:
        return self.bits

    def state(self, sample: int) -> dict[str, Any]:
        """Describe the place before a sample: seed, epoch, and sample of the epoch."""
        epoch, within = divmod(sample, len(self.sequences))
        return {"seed": self.seed, "epoch": epoch, "sample": within}

    def sample_of(self, state: dict[str, Any]) -> int:
        """Return the sample that a state stands before; raises CheckpointError if it belongs to
        another seed, corpus or sequence length."""
        check_seed(state, self.seed)
        count = len(self.sequences)
        if state["sample"] >= count:
            raise CheckpointError(
                f"the checkpoint stands at sequence {state['sample']} of an epoch, but this corpus "
                f"has {count}: it was saved with another corpus, seq_len or data.packing"
            )
        if (sample := state["epoch"] * count + state["sample"]) >= MOST:
            raise CheckpointError(f"the checkpoint's sample {sample} is beyond {MOST}")
        return int(sample)


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
