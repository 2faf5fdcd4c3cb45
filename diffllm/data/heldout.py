"""Held-out data: sequences for evaluation during training, documents for the final evaluation.

Symbols in shapes: n documents, r sequences, T tokens per sequence, b sequences per batch.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from diffllm.core.bounds import check_counts, check_rank
from diffllm.core.errors import ConfigError, DataError
from diffllm.data.sequences import Batch, StreamSequences
from diffllm.data.streams import BLOCK, Stream, document_end, document_ends, spans
from diffllm.data.tokenizer import Tokenizer

GOLDEN = (5**0.5 - 1) / 2
"""The first n multiples of this number, modulo 1, are spread evenly over [0, 1) for every n."""
CONTEXT_TOKENS = 4
"""Tokens that are decoded before a cut, because the text of a token can depend on these tokens.

Bytes of a character can be separate tokens, and some tokenizers omit a space at the start of a
text.
"""

OwnedBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs, targets and each target's document, (b, T) int64 each."""


@dataclass(frozen=True)
class HeldoutDocuments:
    stream: Stream
    eos_id: int
    starts: np.ndarray
    """First tokens, (n,) int64, ascending."""
    lengths: np.ndarray
    """Tokens with EOS, (n,) int64."""
    whole: bool = False
    """Keep documents whole if they fit in one sequence, as data.packing=best_fit does."""

    @cached_property
    def predicted(self) -> np.ndarray:
        """Number of predicted tokens of each document, (n,) int64; context tokens do not count."""
        if not self.stream.masked:
            return self.lengths
        pairs = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return np.array([self.stream.loss_mask(i, i + size).sum() for i, size in pairs], np.int64)

    @cached_property
    def ends(self) -> np.ndarray:
        """End (exclusive) of each document in the concatenated documents, (n,) int64."""
        return np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.starts)

    def batches(
        self, seq_len: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[OwnedBatch]:
        """Concatenate the documents, cut them into sequences, and yield the batches of this rank.

        A batch is (inputs, targets, document index of each target), (batch_size, seq_len) int64
        each. Over all ranks, each token is a target exactly once, except context tokens. The first
        input of the first sequence is an EOS. At positions of context tokens and padding, the
        target is -1. At positions of padding, the document index is 0. All ranks get equally many
        batches; the last batches are filled with padding sequences.
        """
        check_rank(rank, world_size)
        # Equally many batches on all ranks: the forward pass of sharded models is collective.
        rounds = self.rounds(seq_len, batch_size, world_size)
        borders = self.borders(seq_len)
        for number in range(rank, rounds * world_size, world_size):
            yield self.read(borders, np.arange(batch_size) + number * batch_size, seq_len)

    def rounds(self, seq_len: int, batch_size: int, world_size: int = 1) -> int:
        check_counts(least=1, seq_len=seq_len, batch_size=batch_size, world_size=world_size)
        return -(-(len(self.borders(seq_len)) - 1) // (batch_size * world_size))

    def borders(self, seq_len: int) -> np.ndarray:
        """Cut the concatenated documents into r sequences of at most `seq_len` tokens.

        Returns positions in the concatenation, (r + 1,) int64: the start of each sequence, then
        the end (exclusive) of the last sequence.
        """
        total = int(self.ends[-1])
        if not self.whole:
            return np.append(np.arange(0, total, seq_len), total)
        borders = [0]
        begins = self.ends - self.lengths
        for begin, end in zip(begins.tolist(), self.ends.tolist(), strict=True):
            # A document that does not fit into the current sequence begins a new sequence.
            if end - borders[-1] > seq_len and begin > borders[-1]:
                borders.append(begin)
            borders += range(borders[-1] + seq_len, end, seq_len)
        return np.array([*borders, total])

    def read(self, borders: np.ndarray, indices: np.ndarray, seq_len: int) -> OwnedBatch:
        """Read the b sequences with the numbers `indices`, an array of shape (b,).

        Return (inputs, targets, document index of each target), (b, seq_len) int64 each. `borders`
        is the result of the method `borders`. For a number beyond the last sequence, return a
        padding sequence, in which all targets are -1.
        """
        shape = len(indices), seq_len
        inputs = np.zeros(shape, np.int64)
        targets = np.full(shape, -1, np.int64)
        owners = np.zeros(shape, np.int64)
        for i, index in enumerate(indices.tolist()):
            if index >= len(borders) - 1:
                break
            start = int(borders[index])
            stop = int(borders[index + 1])
            # The first input is the token before the first target, in the sequence before.
            places = self.places(max(start - 1, 0), stop)
            tokens = np.concatenate([self.stream.tokens(*place) for place in places])
            if not start:
                tokens = np.append(self.eos_id, tokens)  # no token precedes the first document
            masks = [self.stream.loss_mask(*place) for place in self.places(start, stop)]
            size = stop - start
            inputs[i, :size] = tokens[:-1]
            targets[i, :size] = np.where(np.concatenate(masks), tokens[1:], -1)
            owners[i, :size] = np.searchsorted(self.ends, np.arange(start, stop), side="right")
        return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(owners)

    def places(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of the stream that make up [start, stop) of the concatenation."""
        places = []
        for number, begin, end in spans(self.ends, start, stop):
            first = int(self.starts[number])
            places.append((first + begin, first + end))
        return places

    def texts(
        self, tokenizer: Tokenizer, rank: int = 0, world_size: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (text sizes, text hashes) of the held-out documents, (n,) int64 each.

        A size counts the UTF-8 bytes of the predicted tokens, without context. A hash is the first
        8 bytes of the SHA-256 of the whole text. Rank r computes the documents r, r + world_size,
        ... and returns 0 for the others. Add the arrays of all ranks to get all values.
        """
        check_rank(rank, world_size)
        sizes, hashes = np.zeros((2, len(self)), dtype=np.int64)
        for i in range(rank, len(self), world_size):
            span = int(self.starts[i]), int(self.starts[i] + self.lengths[i])
            tokens = self.stream.tokens(*span)
            text = tokenizer.decode(tokens.tolist()).encode()
            digest = hashlib.sha256(text).digest()
            sizes[i] = len(text)
            hashes[i] = int.from_bytes(digest[:8], signed=True)
            if self.predicted[i] < self.lengths[i]:
                sizes[i] = text_size(tokenizer, tokens[self.stream.loss_mask(*span)])
        return sizes, hashes


def text_size(tokenizer: Tokenizer, tokens: np.ndarray, before: int = 0) -> int:
    """Count the UTF-8 bytes of the text of one document's tokens, without the first `before`.

    If a cut divides a character, its decoded pieces have other sizes than its bytes, but sizes of
    consecutive tokens still add up to the size of their text.
    """
    size = len(tokenizer.decode(tokens.tolist()).encode())
    if before:
        size -= len(tokenizer.decode(tokens[:before].tolist()).encode())
    return size


def predicted_text(
    stream: Stream, tokenizer: Tokenizer, eos_id: int, start: int, stop: int
) -> tuple[int, int]:
    """Count predicted tokens in [start, stop) of a stream, and the UTF-8 bytes of their text.

    The sums over consecutive ranges are equal to the sums over documents: each document is decoded
    separately, and a document that begins earlier with CONTEXT_TOKENS tokens before `start`.
    """
    first = max(start - CONTEXT_TOKENS, 0)
    tokens = stream.tokens(first, stop)
    mask = stream.loss_mask(first, stop)
    ends = (np.flatnonzero(tokens == eos_id) + 1).tolist()
    size = begin = 0
    # The last part is empty, or its document continues after `stop`.
    for end in [*ends, len(tokens)]:
        if end > start - first:
            predicted = mask[begin:end]
            before = int(predicted[: max(start - first - begin, 0)].sum())
            size += text_size(tokenizer, tokens[begin:end][predicted], before)
        begin = end
    return int(mask[start - first :].sum()), size


def heldout_documents(
    stream: Stream,
    eos_id: int,
    tokens: float | None = None,
    most: int | None = None,
    whole: bool = False,
) -> HeldoutDocuments:
    """Choose documents from the held-out split `stream`; by default all documents.

    The documents are spread evenly over the stream. A larger `tokens` or `most` keeps the chosen
    documents and adds others. Raises ConfigError if `tokens` or `most` is not positive.

    Args:
        tokens: choose documents until their total number of tokens is at least this number.
        most: maximum number of documents; None for no maximum.
        whole: when `batches` cuts the documents into sequences, do not cut a document that fits in
            one sequence.
    """
    if tokens is not None and not tokens > 0:
        raise ConfigError(
            f"heldout_documents: tokens={tokens} must be above 0; for all documents, use None"
        )
    check_counts(least=1, most=1 if most is None else most)
    tokens = len(stream) if tokens is None else min(tokens, len(stream))
    if most is None and tokens == len(stream):
        ends = np.concatenate([ends for _, ends in document_ends(stream, eos_id)])
        if not len(ends) or ends[-1] < len(stream):
            ends = np.append(ends, len(stream))
        starts = np.append(0, ends[:-1])
        return HeldoutDocuments(stream, eos_id, starts, np.diff(ends, prepend=0), whole)
    # Every further document is chosen by a rule that does not depend on `tokens` and `most`, so
    # larger values only add documents.
    end_by_start: dict[int, int] = {}
    for number in itertools.count():
        place = int(len(stream) * (number * GOLDEN % 1))
        start = document_end(stream, eos_id, place - 1) % len(stream) if place else 0
        # If the document is already chosen, take the next one (after the last, the first).
        while start in end_by_start:
            start = end_by_start[start] % len(stream)
        end_by_start[start] = document_end(stream, eos_id, start)
        tokens -= end_by_start[start] - start
        if tokens <= 0 or len(end_by_start) == most:
            break
    starts = np.array(sorted(end_by_start))
    lengths = np.array([end_by_start[start] for start in starts.tolist()]) - starts
    return HeldoutDocuments(stream, eos_id, starts, lengths, whole)


def heldout_tokens(stream: Stream, eos_id: int, tokens: float | None = None) -> int:
    """Count the predicted tokens of the documents that `heldout_documents` chooses for `tokens`.

    Context tokens, such as prompts, do not count. Raises DataError if all tokens are context.
    """
    if tokens is not None and not tokens >= len(stream):  # true for NaN, which raises
        count = int(heldout_documents(stream, eos_id, tokens).predicted.sum())
    else:
        count = 0
        for start in range(0, len(stream), BLOCK):
            count += int(stream.loss_mask(start, min(start + BLOCK, len(stream))).sum())
    if not count:
        raise DataError(
            "the held-out documents have no token to predict, because all tokens are prompts; "
            "increase data.heldout_fraction"
        )
    return count


@dataclass(frozen=True)
class HeldoutSample:
    """Sequences of a held-out split, spread evenly over `stream`; always the same ones.

    Raises DataError if the stream is shorter than one sequence.
    """

    stream: Stream
    seq_len: int
    sequences: int
    """Maximum number of sequences."""
    eos_id: int
    whole: bool = False
    """Do not cut documents that fit in one sequence, as data.packing=best_fit does."""

    def __post_init__(self) -> None:
        check_counts(least=1, sequences=self.sequences)
        # A stream that is too short must raise here, not during training.
        _ = self.cut

    @cached_property
    def cut(self) -> StreamSequences:
        return StreamSequences(self.stream, self.seq_len)

    @cached_property
    def documents(self) -> HeldoutDocuments:
        return heldout_documents(self.stream, self.eos_id, len(self) * self.seq_len, whole=True)

    @cached_property
    def borders(self) -> np.ndarray:
        return self.documents.borders(self.seq_len)

    def __len__(self) -> int:
        return min(self.sequences, len(self.cut))

    @cached_property
    def places(self) -> np.ndarray:
        """Numbers of the sequences in `cut` or between `borders`, (len(self),) int64."""
        available = len(self.borders) - 1 if self.whole else len(self.cut)
        return np.arange(len(self), dtype=np.int64) * available // len(self)

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Yield the batches of this rank: (inputs, targets), (b, seq_len) int64 each.

        The sequences are divided among the ranks, so a rank may get no batch. b is `batch_size`;
        only the last batch of a rank may have fewer sequences.
        """
        check_counts(least=1, batch_size=batch_size)
        check_rank(rank, world_size)
        rank_places = self.places[rank::world_size]
        for start in range(0, len(rank_places), batch_size):
            places = rank_places[start : start + batch_size]
            if self.whole:
                yield self.documents.read(self.borders, places, self.seq_len)[:2]
            else:
                yield self.cut.read(places)

    def predicted_text(
        self, tokenizer: Tokenizer, rank: int = 0, world_size: int = 1
    ) -> tuple[int, int]:
        """Count predicted tokens and the UTF-8 bytes of their text in the sequences of this rank.

        Add the counts of all ranks to get the counts of the sample.
        """
        check_rank(rank, world_size)
        tokens = size = 0
        for place in self.places[rank::world_size].tolist():
            for start, stop in self.targets(place):
                counts = predicted_text(self.stream, tokenizer, self.eos_id, start, stop)
                tokens += counts[0]
                size += counts[1]
        return tokens, size

    def targets(self, place: int) -> list[tuple[int, int]]:
        """Return the ranges of the stream that contain the targets of one sequence."""
        if self.whole:
            start, stop = self.borders[place : place + 2].tolist()
            return self.documents.places(start, stop)
        start = place * self.seq_len + 1
        return [(start, start + self.seq_len)]
