"""The samples of a mixture: each source in its own shuffled order, interleaved by weight."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from diffllm.core.errors import CheckpointError, DataError
from diffllm.core.typed import made
from diffllm.data.config import DataConfig
from diffllm.data.mixture.curriculum import Segments, from_sample, limited, segments
from diffllm.data.mixture.naming import of_source
from diffllm.data.mixture.order import MixtureOrder
from diffllm.data.mixture.place import MixturePlace
from diffllm.data.mixture.prepared import MixtureData
from diffllm.data.samples import check_seed, shuffled
from diffllm.data.sequences import Batch
from diffllm.data.shards import Split
from diffllm.data.training_sequences import training_sequences


class MixedSequences(Dataset[Batch | DataError]):
    """Sample g of a run is a sequence of the source that the mixture's order has at place g, the
    next one in that source's own shuffled order.

    Args:
        total: samples of the whole run, which a curriculum's shares are of.

    Raises DataError for a source that is shorter than a sequence, ConfigError where no source is
    left before the run's end.
    """

    def __init__(
        self, data: MixtureData, cfg: DataConfig, seq_len: int, seed: int, total: int
    ) -> None:
        self.data, self.names = data, list(data.sources)
        self.seq_len, self.seed, self.total = seq_len, seed, total
        self.sources = [
            of_source(name)(training_sequences)(each, cfg, seq_len)
            for name, each in data.sources.items()
        ]
        self.sequences = [len(each) for each in self.sources]
        limits = [source.epochs_at_most for source in cfg.sources.values()]
        self.most = [
            math.inf if limit is None else math.floor(limit * count)
            for limit, count in zip(limits, self.sequences, strict=True)
        ]
        self.plan = segments(cfg, total, seq_len)
        self._go_on(0, [0] * len(self.names))

    def __getitem__(self, samples: range) -> Batch | DataError:
        """Return (inputs, targets) of samples, or the error."""
        sources, numbers = self.order.places(np.asarray(samples, np.int64))
        inputs, targets = torch.empty(2, len(samples), self.seq_len, dtype=torch.int64)
        for k in np.unique(sources).tolist():
            here = np.flatnonzero(sources == k)
            places = shuffled(numbers[here], self.sequences[k], f"{self.seed}/{self.names[k]}")
            try:
                with of_source(self.names[k]):
                    read = self.sources[k].read(places)
            except DataError as error:
                return error
            inputs[here], targets[here] = read
        return inputs, targets

    def consumed(self, sample: int) -> dict[str, float]:
        """Return `data/tokens/<source>` and `data/epochs/<source>` before a sample."""
        found: dict[str, float] = {}
        for name, count, whole in zip(
            self.names, self.order.counts(sample), self.sequences, strict=True
        ):
            found[f"data/tokens/{name}"] = count * self.seq_len
            found[f"data/epochs/{name}"] = count / whole
        return found

    def bits_per_nat(self, sample: int) -> float | None:
        """Return the bits per byte that equal 1 nat per token, as `Samples` says."""
        splits = [data.manifest.splits["train"] for data in self.data.sources.values()]
        return mean_bits_per_nat(splits, [n * self.seq_len for n in self.order.counts(sample)])

    def state(self, sample: int) -> dict[str, Any]:
        """Describe the place before a sample: what each source has given, the weights from here on,
        and since when they hold."""
        return {
            "seed": self.seed,
            "sample": sample,
            "consumed": dict(zip(self.names, self.order.counts(sample), strict=True)),
            "since": self.since,
            "before": dict(zip(self.names, self.before, strict=True)),
            "weights": [[start, *weights] for start, weights in self.plan],
        }

    def sample_of(self, state: dict[str, Any]) -> int:
        """Return the sample that a state stands before, and go on from there: as it began where
        the weights are the same, else by the new ones, each source with its next sequence.

        Raises CheckpointError if it belongs to another seed or other sources.
        """
        check_seed(state, self.seed)
        known = [*state.get("consumed", {})]
        if known != self.names:
            of = f"the sources {', '.join(known)}" if known else "no mixture"
            raise CheckpointError(
                f"the checkpoint is of {of}, this run of the sources {', '.join(self.names)}"
            )
        try:
            place = made(MixturePlace, state)
            place.check()
        except ValueError as error:
            raise CheckpointError(f"the checkpoint has no usable loop.data: {error}") from error
        sample = place.sample
        former: Segments = [(int(start), tuple(shares)) for start, *shares in place.weights]
        if former and from_sample(former, sample) == from_sample(self.plan, sample):
            self.plan = former
            self._go_on(place.since, list(place.before.values()))
        else:
            self._go_on(sample, list(place.consumed.values()))
        return sample

    def _go_on(self, since: int, before: list[int]) -> None:
        """Lay the order out anew from a sample on."""
        self.since, self.before = since, before
        plan: Segments = limited(self.plan, since, self.total, before, self.most)
        self.order = MixtureOrder(plan, before)


def mean_bits_per_nat(splits: Sequence[Split], tokens: Sequence[int]) -> float | None:
    """Return the bits per byte that equal 1 nat per token, if `tokens` were read from each split.

    Returns None if nothing was read or the text of a split is unknown.
    """
    each = [
        (count * split.share_predicted, split.bits_per_byte(1.0))
        for split, count in zip(splits, tokens, strict=True)
    ]
    known = [(count, bits) for count, bits in each if count and bits is not None]
    if len(known) < sum(count > 0 for count, _ in each) or not known:
        return None
    return sum(count for count, _ in known) / sum(count / bits for count, bits in known)
