"""One part of a corpus to token shards of its own, and a record of what they hold."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diffllm.core.errors import DataError
from diffllm.core.files import replace_file
from diffllm.core.typed import read_typed
from diffllm.data.preparation.arrays import write_array
from diffllm.data.preparation.workers import Meter
from diffllm.data.shards import SPLITS, ShardWriter, Split, check_splits
from diffllm.data.text.corpus import Part
from diffllm.data.tokenizer import Tokenizer

BATCH_BYTES, BATCH_DOCUMENTS = 4_000_000, 20_000
ALL_HASHES = 2**64
HALF = 2**63
"""Hashes less this fit into 64 bits with a sign, as numbers of JSON must."""


class Document(NamedTuple):
    """A document in UTF-8."""

    text: bytes
    prompt: tuple[bytes, ...] = ()
    """The pieces before the text, in turn only context and to be predicted; context last."""

    @property
    def predicted_bytes(self) -> int:
        """The bytes of it that are to be predicted."""
        return len(self.text) + sum(map(len, self.prompt[1::2]))


@dataclass(frozen=True)
class PartRecord:
    """A description of the shards of a part, written when they are complete."""

    splits: dict[str, Split]
    skipped_empty: int
    below: int
    """Documents whose hash is below this are held out; all hashes here are less HALF."""
    least: int | None
    most: int | None
    """The range of the documents' hashes; None where there is no document."""

    @classmethod
    def load(cls, directory: Path, number: int) -> "PartRecord":
        """Read the record of a part; raises OSError, or ValueError for a damaged record."""
        record = read_typed(record_path(directory, number), cls)
        check_splits(record.splits)
        return record

    def changes_with(self, below: int) -> bool:
        """Whether another hash below which documents are held out holds others out here."""
        low, high = sorted((below - HALF, self.below))
        if self.least is None or self.most is None or low == high:
            return False
        return self.least < high and self.most >= low


@dataclass(frozen=True)
class Encoding:
    """All that encoding a part takes."""

    parts: Sequence[Part]
    tokenizer: Tokenizer
    records: Path
    """Directory of the records of parts that are done."""
    directory: Path
    """Directory of shards."""
    heldout_below: int
    """Documents whose hash is below this are held out."""
    last_is_heldout: bool
    """Instead of these, the last part alone is held out."""
    has_prompts: bool
    """Whether documents begin with what is only context."""

    def is_done(self, number: int) -> bool:
        """Whether the shards of a part are complete, whichever documents they hold out."""
        return self.record(number) is not None

    def is_stale(self, number: int) -> bool:
        """Whether a part has to be encoded anew, since it holds other documents out."""
        record = self.record(number)
        return record is None or record.changes_with(self.heldout_below)

    def record(self, number: int) -> PartRecord | None:
        """Read the record of a part; None where it is not done."""
        try:
            return PartRecord.load(self.records, number)
        except (OSError, ValueError):
            return None

    def encode(self, number: int, meter: Meter, threads: int) -> None:
        """Write the shards of a part, those of former attempts over, and then its record."""
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # of tokenizers, which has threads a process
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        vocab_size, masked = self.tokenizer.vocab_size, self.has_prompts
        writers = {
            split: ShardWriter(self.directory, f"{split}-{number:05d}", vocab_size, masked)
            for split in SPLITS
        }
        empty, least, most = 0, ALL_HASHES, -1
        for kept, blank in batches(self.parts[number]):
            empty += blank
            if not kept:
                continue
            hashes = document_hashes(kept)
            least, most = min(least, int(hashes.min())), max(most, int(hashes.max()))
            tokens, sizes = self.tokens_of(kept, threads)
            is_heldout = self.heldout(number, hashes)
            for split, chosen in zip(SPLITS, (~is_heldout, is_heldout), strict=True):
                mine = np.flatnonzero(chosen).tolist()
                ids = [tokens[i] for i in mine]
                writers[split].add(
                    np.fromiter(chain.from_iterable(ids), dtype=np.uint32),
                    sum(kept[i].predicted_bytes for i in mine),
                    len(mine),
                    loss_mask([sizes[i] for i in mine]) if masked else None,
                )
            meter.add(sum(d.predicted_bytes for d in kept), sum(map(len, tokens)))
        splits = {split: writer.finish() for split, writer in writers.items()}
        counts = writers["heldout"].counts
        there_are = np.flatnonzero(counts)
        write_array(counts_path(self.records, number), np.stack((there_are, counts[there_are])))
        there = most >= 0
        record = PartRecord(
            splits=splits,
            skipped_empty=empty,
            below=self.heldout_below - HALF,
            least=least - HALF if there else None,
            most=most - HALF if there else None,
        )
        replace_file(record_path(self.records, number), json.dumps(asdict(record)))

    def tokens_of(
        self, documents: Sequence[Document], threads: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Encode documents, each with its EOS; where there are prompts, say also how many tokens of
        each are in turn only context and to be predicted.

        What is only context is encoded apart, so that no token is of both.
        """
        texts = [document.text.decode() for document in documents]
        tokens = self.tokenizer.encode_batch(texts, threads)
        for ids in tokens:
            ids.append(self.tokenizer.eos_id)
        if not self.has_prompts:
            return tokens, []
        before = [piece.decode() for document in documents for piece in document.prompt]
        encoded = iter(self.tokenizer.encode_batch(before, threads))
        apart = [
            [*(list(islice(encoded, len(document.prompt))) or [[]]), ids]
            for document, ids in zip(documents, tokens, strict=True)
        ]
        return [list(chain(*ids)) for ids in apart], [list(map(len, ids)) for ids in apart]

    def heldout(self, number: int, hashes: np.ndarray) -> np.ndarray:
        """Choose the documents of a part that are held out, (n,) bool."""
        if self.last_is_heldout:
            return np.full(len(hashes), number == len(self.parts) - 1)
        return hashes < np.uint64(self.heldout_below)


def batches(part: Part) -> Iterator[tuple[list[Document], int]]:
    """Yield the documents of a part that are more than whitespace, in order, in lists of about
    BATCH_BYTES or BATCH_DOCUMENTS, and how many were not; raises DataError."""
    batch: list[Document] = []
    empty = size = 0
    for some in part.read():
        for text, before in zip(some.texts, some.before, strict=True):
            if not text or text.isspace():
                empty += 1
                continue
            try:
                batch.append(Document(text.encode(), tuple(map(str.encode, before))))
            except UnicodeEncodeError as error:
                raise DataError(f"{part.name}: a text that UTF-8 cannot write: {error}") from error
            size += len(text)
            if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                yield batch, empty
                batch, size, empty = [], 0, 0
    if batch or empty:
        yield batch, empty


def document_hashes(documents: Sequence[Document]) -> np.ndarray:
    """Return the first 8 bytes of the SHA-256 of documents, (n,) uint64: of the text, or of the
    prompt's pieces and the text with a zero byte between them."""
    contents = (b"\0".join((*d.prompt, d.text)) for d in documents)
    hashes = (int.from_bytes(hashlib.sha256(content).digest()[:8]) for content in contents)
    return np.fromiter(hashes, np.uint64, len(documents))


def loss_mask(sizes: Sequence[Sequence[int]]) -> np.ndarray:
    """Return which tokens of documents, one behind the other, are to be predicted, (n,) bool, where
    each has so many tokens that are in turn only context and to be predicted."""
    lengths = np.fromiter(chain.from_iterable(sizes), dtype=np.int64)
    return np.repeat(np.resize([False, True], len(lengths)), lengths)


def record_path(directory: Path, number: int) -> Path:
    return directory / f"part-{number:05d}.json"


def counts_path(directory: Path, number: int) -> Path:
    """Return the place of a part's held-out tokens and how often each is there, (2, n) int64."""
    return directory / f"heldout-{number:05d}.npy"
