"""Training sequences of a source: cut from a token stream, or packed from whole documents.

Symbols in shapes: T tokens per sequence, m sequences that are read at once.
"""

from functools import partial, reduce
from operator import add
from pathlib import Path

import numpy as np
import torch

from diffllm.core.atomic_directories import build_once
from diffllm.core.bounds import check_counts
from diffllm.core.errors import DataError
from diffllm.core.targets import PADDING_TARGET
from diffllm.data.config import DataConfig, Packing
from diffllm.data.packing import (
    PACKING_WINDOW,
    PLAN_VERSION,
    PackingCounts,
    PackingPlan,
    write_plan,
)
from diffllm.data.prepared import MixtureData, Prepared, TokenData, of_source
from diffllm.data.shards import Manifest
from diffllm.data.streams import Stream, as_targets
from diffllm.data.text.file_index import combined_hash

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, (m, T) int64 each; negative targets are ignored (diffllm/core/targets.py)."""


class StreamSequences:
    """Sequences of `seq_len` tokens from a token stream; sequence i starts at token i * seq_len.

    A sequence may contain the end of one document and the start of the next document.
    """

    def __init__(self, stream: Stream, seq_len: int) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self.count = sequences_in(stream, seq_len)

    def __len__(self) -> int:
        return self.count

    def read(self, places: np.ndarray) -> Batch:
        """Read the m sequences with the indices `places`; return (inputs, targets).

        Both are (m, seq_len) int64; context tokens have target CONTEXT_TARGET. Raises DataError for
        unreadable tokens.
        """
        inputs = []
        targets = []
        for start in (places * self.seq_len).tolist():
            tokens = self.stream.tokens(start, start + self.seq_len + 1)
            inputs.append(tokens[:-1])
            targets.append(as_targets(self.stream, start + 1, tokens[1:]))
        return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))


def sequences_in(stream: Stream, seq_len: int) -> int:
    """Return how many sequences a stream contains: (len(stream) - 1) // seq_len.

    The last target of a sequence is the first input of the next sequence. Raises DataError if the
    stream has fewer than seq_len + 1 tokens. Raises ConfigError if `seq_len` is below 1.
    """
    check_counts(least=1, seq_len=seq_len)
    # Minus 1: the last input has the token after it as target.
    sequences = (len(stream) - 1) // seq_len
    if sequences < 1:
        raise DataError(
            f"the corpus is shorter than one sequence: its {stream.split} split has "
            f"{len(stream)} tokens, but seq_len={seq_len} needs {seq_len + 1}; "
            "reduce seq_len or add documents"
        )
    return sequences


class PackedSequences:
    """Sequences that contain whole documents and padding.

    A document longer than a sequence is cut into pieces. `plan` lists the documents and pieces of
    each sequence, in corpus order. The first token of a document is predicted from an EOS,
    so every token of `stream` except context is a target once. Padding has input EOS and target
    PADDING_TARGET, also the EOS that separates a piece of a cut document from the document before.
    """

    def __init__(self, stream: Stream, eos_id: int, seq_len: int, plan: PackingPlan) -> None:
        self.stream = stream
        self.eos_id = eos_id
        self.seq_len = seq_len
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.counts.sequences

    def read(self, places: np.ndarray) -> Batch:
        inputs = np.full((len(places), self.seq_len), self.eos_id, np.int64)
        targets = np.full_like(inputs, PADDING_TARGET)
        for row, place in enumerate(places.tolist()):
            begin = 0
            for start, length in self.plan[place]:
                stop = start + length
                # The plan is a cache file: a damaged plan must not read other tokens silently.
                self.plan.require(0 <= start < stop <= len(self.stream))
                # The first token of a piece is predicted from the token before.
                tokens = self.stream.tokens(max(start - 1, 0), stop)
                if not start:
                    # No EOS precedes the first document of the corpus.
                    tokens = np.append(self.eos_id, tokens)
                if tokens[0] != self.eos_id and length < self.seq_len:
                    # An EOS separates the last piece of a cut document from the document before.
                    begin += 1
                end = begin + length
                self.plan.require(end <= self.seq_len)
                inputs[row, begin:end] = tokens[:-1]
                targets[row, begin:end] = as_targets(self.stream, start, tokens[1:])
                begin = end
        return torch.from_numpy(inputs), torch.from_numpy(targets)


Sequences = StreamSequences | PackedSequences


def training_sequences(data: TokenData, cfg: DataConfig, seq_len: int) -> Sequences:
    """Return the sequences in the training split of one source.

    With data.packing=best_fit, the first call packs the documents and stores the packing plan in
    the cache. Several processes may call this function at once, even before process groups exist.
    Raises DataError if the tokens are unreadable, the split is shorter than one sequence or the
    cache directory is unusable. Raises ConfigError for an invalid `seq_len`.
    """
    stream = data.split("train")
    if cfg.packing is Packing.stream:
        return StreamSequences(stream, seq_len)
    eos_id = data.manifest.eos_id
    cache_dir = Path(cfg.cache_dir).expanduser()
    directory = cache_dir / "packing" / plan_key(data.manifest, seq_len)
    try:
        build_once(directory, partial(write_plan, stream, eos_id, seq_len))
    except OSError as error:
        raise DataError(f"data.cache_dir={cache_dir}: {error.strerror or error}") from error
    return PackedSequences(stream, eos_id, seq_len, PackingPlan(directory))


def plan_key(manifest: Manifest, seq_len: int) -> str:
    shards = [[shard.sha256, shard.tokens] for shard in manifest.splits["train"].shards]
    tokens = [manifest.corpus, manifest.pieces_hash, manifest.eos_id, shards]
    # Everything that determines a plan, in an order that must not change: stored plans would not
    # be found again.
    plan_hash = combined_hash([PLAN_VERSION, PACKING_WINDOW, *tokens, seq_len])
    return plan_hash[:32]


def sequences_of_epoch(data: Prepared, cfg: DataConfig, seq_len: int) -> int:
    counts = packing_counts(data, cfg, seq_len)
    if counts is None:
        return sequences_in(data.split("train"), seq_len)
    return counts.sequences


def packing_counts(data: Prepared, cfg: DataConfig, seq_len: int) -> PackingCounts | None:
    """Return the numbers of documents, sequences and padding tokens in the packed training splits.

    The numbers are sums over all sources. Returns None if data.packing=stream.
    """
    if cfg.packing is Packing.stream:
        return None
    if isinstance(data, MixtureData):
        sequences_by_source = []
        for name, source in data.sources.items():
            with of_source(name):
                sequences_by_source.append(training_sequences(source, cfg, seq_len))
    else:
        sequences_by_source = [training_sequences(data, cfg, seq_len)]
    counts = []
    for sequences in sequences_by_source:
        # Always true here; it tells the type checker that there is a plan.
        if isinstance(sequences, PackedSequences):
            counts.append(sequences.plan.counts)
    return reduce(add, counts)


def ignores_targets(data: Prepared, cfg: DataConfig) -> bool:
    """Return whether the loss ignores some training targets: padding or context tokens."""
    return cfg.packing is Packing.best_fit or data.manifest.splits["train"].masked
