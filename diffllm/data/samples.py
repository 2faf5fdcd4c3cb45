"""Map global sample numbers to training sequences, in a seeded random order.

Symbols in shapes: T tokens per sequence, m sequences per micro-batch, n sequences of a source.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from diffllm.core.bounds import check_counts
from diffllm.core.errors import CheckpointError, DataError
from diffllm.core.typed import made
from diffllm.data.config import DataConfig
from diffllm.data.mixture_order import SAMPLE_LIMIT, MixtureOrder, MixturePlace
from diffllm.data.mixture_plan import Segments, from_sample, limited, segments
from diffllm.data.prepared import MixtureData, Prepared, of_source
from diffllm.data.sequences import Batch, Sequences, training_sequences
from diffllm.data.shards import Split

ROUNDS = 8
CORPUS = "corpus"
"""Name of the only source of a run without a mixture."""


class Place(NamedTuple):
    """Samples `first` to `stop - 1` of one source, in the order in which the run reads the source.

    In contrast to numbers of a mixture's samples, a place does not depend on mixture weights.
    """

    source: str
    first: int
    stop: int


class PlacedBatch(NamedTuple):
    """The m samples of a `Place`: (inputs, targets), (m, T) int64 each."""

    sequences: np.ndarray
    """Indices of the sequences in their source, (m,) int64."""
    batch: Batch


class ShuffledSequences:
    """Infinite training samples of one source, shuffled again in every epoch.

    The source has n sequences. Sample g is the sequence at position g % n of the random order of
    epoch g // n. `bits` is the factor that converts a loss in nats per token to bits per byte of
    text; None if the text size is unknown. `stage` is the number of earlier stages.
    """

    def __init__(
        self, sequences: Sequences, seed: int, bits: float | None = None, stage: int = 0
    ) -> None:
        self.sequences = sequences
        self.seed = seed
        self.bits = bits
        self.order_seed = order_seed(seed, stage)

    def __getitem__(self, samples: range) -> Batch | DataError:
        """Return the m samples with these numbers as (inputs, targets), (m, T) int64 each.

        If the data is unreadable, return a DataError instead of raising it, because PyTorch adds a
        traceback to the message of a raised error.
        """
        numbers = np.asarray(samples, np.int64)
        indices = shuffled(numbers, len(self.sequences), self.order_seed)
        try:
            return self.sequences.read(indices)
        except DataError as error:
            return error

    def places(self, samples: range) -> list[Place]:
        """Return the places of these samples, one per source that provides any of them."""
        return [Place(CORPUS, samples.start, samples.stop)]

    def read(self, place: Place) -> PlacedBatch:
        """Read the samples of a place. Raises DataError for unreadable data or unknown sources."""
        check_source(place, [CORPUS])
        numbers = np.arange(place.first, place.stop, dtype=np.int64)
        sequences = shuffled(numbers, len(self.sequences), self.order_seed)
        return PlacedBatch(sequences, self.sequences.read(sequences))

    def consumed(self, sample: int) -> dict[str, float]:
        return {}

    def bits_per_nat(self, sample: int) -> float | None:
        return self.bits

    def state(self, sample: int) -> dict[str, Any]:
        epoch, within = divmod(sample, len(self.sequences))
        return {"seed": self.seed, "epoch": epoch, "sample": within}

    def sample_of(self, state: dict[str, Any]) -> int:
        """Return the number of the first sample after the saved position `state`.

        Raises CheckpointError if `state` has another seed or does not fit the corpus.
        """
        check_seed(state, self.seed)
        count = len(self.sequences)
        if state["sample"] >= count:
            raise CheckpointError(
                f"the checkpoint is at sequence {state['sample']} of an epoch, but this corpus has "
                f"{count} sequences; resume with the checkpoint's corpus, seq_len and data.packing"
            )
        sample = state["epoch"] * count + state["sample"]
        if sample >= SAMPLE_LIMIT:
            raise CheckpointError(
                f"the checkpoint is invalid: its sample number {sample} must be below "
                f"{SAMPLE_LIMIT}; resume from another checkpoint"
            )
        return int(sample)


def shuffled(samples: np.ndarray, sequences: int, seed: int | str) -> np.ndarray:
    """Map sample numbers (m,) to sequence indices (m,) in a source of `sequences` sequences.

    Each epoch contains all sequences of the source, in a new random order.
    """
    epochs, positions = np.divmod(samples, sequences)
    indices = np.empty_like(positions)
    # A range of samples can extend over the end of an epoch.
    for epoch in np.unique(epochs).tolist():
        is_in_epoch = epochs == epoch
        indices[is_in_epoch] = permute(positions[is_in_epoch], sequences, seed, epoch)
    return indices


def check_source(place: Place, sources: list[str]) -> None:
    if place.source not in sources:
        raise DataError(f"the data has no source {place.source!r}, only {', '.join(sources)}")


def order_seed(seed: int, stage: int) -> int | str:
    """Return the seed of the random orders, which differ between stages of training."""
    return f"{seed}, stage {stage}" if stage else seed


def check_seed(state: dict[str, Any], seed: int) -> None:
    if state["seed"] != seed:
        raise CheckpointError(
            f"the checkpoint's data order has seed={state['seed']}, but this run has seed={seed}; "
            f"resume with seed={state['seed']}"
        )


def permute(indices: np.ndarray, n: int, seed: int | str, epoch: int) -> np.ndarray:
    """Map indices in [0, n) by a random permutation that depends only on n, seed and epoch.

    The permutation is never stored: a Feistel network permutes the smallest 4**k >= n integers.
    Results outside [0, n) pass through the network again until all are inside (cycle walking). The
    map remains a bijection (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    `indices` may have any shape; the result is int64 of the same shape. Only integer arithmetic is
    used, so the result is equal on every platform.
    """
    message = f"{seed}:{epoch}".encode()
    digest = hashlib.blake2b(message, digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    # Half of the bits of n - 1, rounded up, because both halves of the network are equally wide.
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    values = np.asarray(indices, dtype=np.uint64)
    permuted = _feistel(values, keys, half_bits)
    is_outside = permuted >= n
    while is_outside.any():
        permuted[is_outside] = _feistel(permuted[is_outside], keys, half_bits)
        is_outside = permuted >= n
    return permuted.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    """Permute uint64 values of 2 * half_bits bits by a Feistel network with one key per round."""
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    upper = values >> shift
    lower = values & mask
    for key in keys:
        # Each round can be undone with any hash, so the network is a permutation.
        round_bits = _splitmix64_hash(lower ^ key) & mask
        upper, lower = lower, upper ^ round_bits
    return (upper << shift) | lower


def _splitmix64_hash(x: np.ndarray) -> np.ndarray:
    # Products wrap around at 2**64, as the hash intends.
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class MixedSequences:
    """Training samples of a mixture of sources.

    A MixtureOrder chooses the source of each sample. The sample is the next unread sequence of this
    source. The sequences of each source are shuffled independently. `total` is the number of
    samples of the run, and `stage` the number of earlier stages. The constructor raises DataError
    if a source is shorter than one sequence, and ConfigError if all sources reach epochs_at_most
    before the end of the run.
    """

    def __init__(
        self,
        data: MixtureData,
        cfg: DataConfig,
        seq_len: int,
        seed: int,
        total: int,
        stage: int = 0,
    ) -> None:
        self.data = data
        self.names = list(data.sources)
        self.seq_len = seq_len
        self.seed = seed
        self.total = total
        self.order_seed = order_seed(seed, stage)
        self.sources: list[Sequences] = []
        for name, source in data.sources.items():
            with of_source(name):
                self.sources.append(training_sequences(source, cfg, seq_len))
        self.sequences = [len(source) for source in self.sources]
        self.most: list[float] = []
        for source_cfg, count in zip(cfg.sources.values(), self.sequences, strict=True):
            epochs = source_cfg.epochs_at_most
            most = math.inf if epochs is None else math.floor(epochs * count)
            self.most.append(most)
        self.plan = segments(cfg, total, seq_len)
        self._order_from(0, [0] * len(self.names))

    def __getitem__(self, samples: range) -> Batch | DataError:
        # For each sample: the index of its source, and its number within this source.
        sources, numbers = self.order.places(np.asarray(samples, np.int64))
        inputs, targets = torch.empty(2, len(samples), self.seq_len, dtype=torch.int64)
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            try:
                source_batch = self._read(source, numbers[rows])
            except DataError as error:
                # The error is returned, not raised, as by `ShuffledSequences`.
                return error
            inputs[rows], targets[rows] = source_batch.batch
        return inputs, targets

    def _read(self, source: int, numbers: np.ndarray) -> PlacedBatch:
        name = self.names[source]
        # The seed contains the name: sources of equal length are shuffled differently, and the
        # order of a source does not depend on the other sources.
        seed = f"{self.order_seed}/{name}"
        indices = shuffled(numbers, self.sequences[source], seed)
        with of_source(name):
            batch = self.sources[source].read(indices)
        return PlacedBatch(indices, batch)

    def places(self, samples: range) -> list[Place]:
        counts_before = self.order.counts(samples.start)
        counts_after = self.order.counts(samples.stop)
        places = []
        for name, first, stop in zip(self.names, counts_before, counts_after, strict=True):
            if stop > first:
                places.append(Place(name, first, stop))
        return places

    def read(self, place: Place) -> PlacedBatch:
        check_source(place, self.names)
        numbers = np.arange(place.first, place.stop, dtype=np.int64)
        return self._read(self.names.index(place.source), numbers)

    def consumed(self, sample: int) -> dict[str, float]:
        counts = self.order.counts(sample)
        values: dict[str, float] = {}
        for name, samples, sequences in zip(self.names, counts, self.sequences, strict=True):
            values[f"data/tokens/{name}"] = samples * self.seq_len
            values[f"data/epochs/{name}"] = samples / sequences
        return values

    def bits_per_nat(self, sample: int) -> float | None:
        splits = [data.manifest.splits["train"] for data in self.data.sources.values()]
        tokens = [count * self.seq_len for count in self.order.counts(sample)]
        return mean_bits_per_nat(splits, tokens)

    def state(self, sample: int) -> dict[str, Any]:
        counts = self.order.counts(sample)
        return {
            "seed": self.seed,
            "sample": sample,
            "consumed": dict(zip(self.names, counts, strict=True)),
            "since": self.since,
            "before": dict(zip(self.names, self.before, strict=True)),
            "weights": [[start, *weights] for start, weights in self.plan],
        }

    def sample_of(self, state: dict[str, Any]) -> int:
        """Continue the mixture at the saved position `state`; return the number of the next sample.

        If the mixture weights have changed, the new weights apply from this sample on. Otherwise,
        the order of sources is the same as without the interruption. Raises CheckpointError for
        another seed, other sources or an invalid state.
        """
        check_seed(state, self.seed)
        names = list(state.get("consumed", {}))
        if names != self.names:
            raise CheckpointError(
                f"the checkpoint has data.sources {', '.join(names) or '(no mixture)'}, but this "
                f"run has data.sources {', '.join(self.names)}; resume with the same sources"
            )
        try:
            place = made(MixturePlace, state)
            place.check()
        except ValueError as error:
            raise CheckpointError(
                "the checkpoint has an invalid data position, the entry loop.data of state.json: "
                f"{error}; resume from another checkpoint"
            ) from error
        sample = place.sample
        former: Segments = []
        for start, *weights in place.weights:
            former.append((int(start), tuple(weights)))
        # With unchanged weights, keep the plan of the checkpoint: its blocks begin elsewhere than
        # those of a plan that begins at this sample.
        if former and from_sample(former, sample) == from_sample(self.plan, sample):
            self.plan = former
            self._order_from(place.since, list(place.before.values()))
        else:
            self._order_from(sample, list(place.consumed.values()))
        return sample

    def _order_from(self, since: int, before: list[int]) -> None:
        self.since = since
        self.before = before
        plan = limited(self.plan, since, self.total, before, self.most)
        self.order = MixtureOrder(plan, before)


def mean_bits_per_nat(splits: Sequence[Split], tokens: Sequence[int]) -> float | None:
    """Return the factor that converts the mean loss over several splits to bits per byte of text.

    The loss is in nats per predicted token. `tokens[i]` is the number of tokens read from
    `splits[i]`, including context and repetitions. Returns None if no predicted token was read, or
    if predicted tokens were read from a split of unknown text size.
    """
    predicted_tokens: list[float] = []
    text_sizes: list[float] = []
    for split, count in zip(splits, tokens, strict=True):
        predicted = count * split.share_predicted
        if not predicted:
            continue
        bits = split.bits_per_byte(1.0)
        if not bits:
            return None
        predicted_tokens.append(predicted)
        # Proportional to the bytes of text of these tokens.
        text_sizes.append(predicted / bits)
    if not predicted_tokens:
        return None
    return sum(predicted_tokens) / sum(text_sizes)


Samples = ShuffledSequences | MixedSequences


def training_samples(
    data: Prepared, cfg: DataConfig, seq_len: int, seed: int, total: int, stage: int = 0
) -> Samples:
    """Return the samples of a training run that reads `total` samples after `stage` earlier stages.

    Raises ConfigError if `seq_len` or `total` is below 1, or if all sources of a mixture reach
    epochs_at_most before the end of the run. Raises DataError if tokens are unreadable or a source
    is shorter than one sequence.
    """
    check_counts(least=1, seq_len=seq_len, total=total)
    if isinstance(data, MixtureData):
        return MixedSequences(data, cfg, seq_len, seed, total, stage)
    bits = data.manifest.splits["train"].bits_per_byte(1.0)
    return ShuffledSequences(training_sequences(data, cfg, seq_len), seed, bits, stage)
