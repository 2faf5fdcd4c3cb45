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
        counts = []
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            is_predicted = self.stream.loss_mask(start, start + length)
            counts.append(is_predicted.sum())
        return np.array(counts, np.int64)

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
            indices = np.arange(batch_size) + number * batch_size
            yield self.read(borders, indices, seq_len)

    def rounds(self, seq_len: int, batch_size: int, world_size: int = 1) -> int:
        check_counts(least=1, seq_len=seq_len, batch_size=batch_size, world_size=world_size)
        sequences = len(self.borders(seq_len)) - 1
        # Rounded up: the last round can be incomplete.
        return -(-sequences // (batch_size * world_size))

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
            fits = end - borders[-1] <= seq_len
            is_sequence_empty = begin <= borders[-1]
            # A document that does not fit into the current sequence begins a new sequence.
            if not fits and not is_sequence_empty:
                borders.append(begin)
            # A document longer than a sequence is cut.
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
            size = stop - start
            # The first input is the token before the first target, in the sequence before.
            input_places = self.places(max(start - 1, 0), stop)
            tokens = np.concatenate([self.stream.tokens(*place) for place in input_places])
            if not start:
                # No token precedes the first document.
                tokens = np.append(self.eos_id, tokens)
            target_places = self.places(start, stop)
            mask = np.concatenate([self.stream.loss_mask(*place) for place in target_places])
            inputs[i, :size] = tokens[:-1]
            targets[i, :size] = np.where(mask, tokens[1:], -1)
            positions = np.arange(start, stop)
            owners[i, :size] = np.searchsorted(self.ends, positions, side="right")
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
            start = int(self.starts[i])
            stop = int(self.starts[i] + self.lengths[i])
            tokens = self.stream.tokens(start, stop)
            text = tokenizer.decode(tokens.tolist()).encode()
            digest = hashlib.sha256(text).digest()
            # Signed, because PyTorch adds the arrays of all ranks as int64.
            hashes[i] = int.from_bytes(digest[:8], signed=True)
            sizes[i] = len(text)
            if self.predicted[i] < self.lengths[i]:
                mask = self.stream.loss_mask(start, stop)
                sizes[i] = text_size(tokenizer, tokens[mask])
        return sizes, hashes


def text_size(tokenizer: Tokenizer, tokens: np.ndarray, before: int = 0) -> int:
    """Count the UTF-8 bytes of the text of one document's tokens, without the first `before`.

    If a cut divides a character, its decoded pieces have other sizes than its bytes, but sizes of
    consecutive tokens still add up to the size of their text.
    """
    text = tokenizer.decode(tokens.tolist())
    size = len(text.encode())
    if before:
        text_before = tokenizer.decode(tokens[:before].tolist())
        size -= len(text_before.encode())
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
    ends = np.flatnonzero(tokens == eos_id) + 1
    # Tokens before `start`, which are only context of the decoding.
    context_tokens = start - first
    size = 0
    begin = 0
    # The last part is empty, or its document continues after `stop`.
    for end in [*ends.tolist(), len(tokens)]:
        if end > context_tokens:
            predicted = mask[begin:end]
            context_of_document = max(context_tokens - begin, 0)
            before = int(predicted[:context_of_document].sum())
            document = tokens[begin:end]
            size += text_size(tokenizer, document[predicted], before)
        begin = end
    return int(mask[context_tokens:].sum()), size


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
    total = len(stream)
    tokens = total if tokens is None else min(tokens, total)
    if most is None and tokens == total:
        ends = np.concatenate([ends for _, ends in document_ends(stream, eos_id)])
        # The last document may have no EOS.
        if not len(ends) or ends[-1] < total:
            ends = np.append(ends, total)
        starts = np.append(0, ends[:-1])
        lengths = np.diff(ends, prepend=0)
        return HeldoutDocuments(stream, eos_id, starts, lengths, whole)
    # Every further document is chosen by a rule that does not depend on `tokens` and `most`, so
    # larger values only add documents.
    end_by_start: dict[int, int] = {}
    for number in itertools.count():
        place = int(total * (number * GOLDEN % 1))
        start = 0
        if place:
            # The first document that begins at `place` or later (after the last, the first).
            start = document_end(stream, eos_id, place - 1) % total
        # If the document is already chosen, take the next one (after the last, the first).
        while start in end_by_start:
            start = end_by_start[start] % total
        end = document_end(stream, eos_id, start)
        end_by_start[start] = end
        tokens -= end - start
        if tokens <= 0 or len(end_by_start) == most:
            break
    starts = np.array(sorted(end_by_start))
    ends = np.array([end_by_start[start] for start in starts.tolist()])
    return HeldoutDocuments(stream, eos_id, starts, ends - starts, whole)


def heldout_tokens(stream: Stream, eos_id: int, tokens: float | None = None) -> int:
    """Count the predicted tokens of the documents that `heldout_documents` chooses for `tokens`.

    Context tokens, such as prompts, do not count. Raises DataError if all tokens are context.
    """
    # `not >=` instead of `<`: it is true for NaN, which `heldout_documents` refuses.
    if tokens is not None and not tokens >= len(stream):
        documents = heldout_documents(stream, eos_id, tokens)
        count = int(documents.predicted.sum())
    else:
        # All documents, which are the stream: counted without a search for their ends.
        count = 0
        for start in range(0, len(stream), BLOCK):
            stop = min(start + BLOCK, len(stream))
            count += int(stream.loss_mask(start, stop).sum())
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
        tokens = len(self) * self.seq_len
        return heldout_documents(self.stream, self.eos_id, tokens, whole=True)

    @cached_property
    def borders(self) -> np.ndarray:
        return self.documents.borders(self.seq_len)

    def __len__(self) -> int:
        return min(self.sequences, len(self.cut))

    @cached_property
    def places(self) -> np.ndarray:
        """Numbers of the sequences in `cut` or between `borders`, (len(self),) int64."""
        available = len(self.borders) - 1 if self.whole else len(self.cut)
        numbers = np.arange(len(self), dtype=np.int64)
        return numbers * available // len(self)

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
                # Without names, which would keep a batch in memory while the next one is read.
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
                range_tokens, range_size = predicted_text(
                    self.stream, tokenizer, self.eos_id, start, stop
                )
                tokens += range_tokens
                size += range_size
        return tokens, size

    def targets(self, place: int) -> list[tuple[int, int]]:
        """Return the ranges of the stream that contain the targets of one sequence."""
        if self.whole:
            start, stop = self.borders[place : place + 2].tolist()
            return self.documents.places(start, stop)
        start = place * self.seq_len + 1
        return [(start, start + self.seq_len)]
