"""Encode a corpus part (a range of documents) to token shards, and save its counts and hashes."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diffllm.core.errors import DataError
from diffllm.core.files import locked, replace_file
from diffllm.core.machine import set_if_ours
from diffllm.core.typed import read_typed
from diffllm.data.preparation.workers import DONE, READING, Counts
from diffllm.data.shards import (
    LEAST_TOKENS,
    SPLITS,
    ShardWriter,
    Split,
    check_split_counts,
    token_dtype,
)
from diffllm.data.text.corpus import Corpus, Part
from diffllm.data.tokenizer import Tokenizer
from diffllm.statistics.bootstrap import LEAST_DOCUMENTS

BATCH_BYTES, BATCH_DOCUMENTS = 4_000_000, 20_000
HASH_OFFSET = 2**63
"""Subtracted from unsigned hashes, so that the result fits into signed 64 bits."""


class Document(NamedTuple):
    text: bytes
    prompt: tuple[bytes, ...] = ()
    """Pieces before the text, alternately context and predicted; the last piece is context."""

    @property
    def predicted_bytes(self) -> int:
        return len(self.text) + sum(map(len, self.prompt[1::2]))


@dataclass(frozen=True)
class PartRecord:
    splits: dict[str, Split]
    skipped_empty: int
    below: int
    """Documents with a smaller hash are held out."""
    least: int | None
    most: int | None
    """Range of the hashes; None without documents."""
    following: list[list[int]]
    """The lowest hashes of training documents, as many as the minimum of the held-out split may
    need; one row [hash, documents, tokens] per hash, ascending."""

    @classmethod
    def load(cls, directory: Path, number: int) -> "PartRecord":
        """Read the JSON record (counts and hashes) of corpus part `number` in `directory`."""
        record = read_typed(record_path(directory, number), cls)
        check_split_counts(record.splits)
        return record


@dataclass(frozen=True)
class Encoding:
    """Encodes parts of a corpus to token shards in the subdirectory "tokens" of `partial`.

    If `cut` is false, documents whose hash is below `heldout_below` are held out. If `cut` is true,
    the parts contain pieces of a single document, and all pieces of the last part are held out.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    partial: Path
    heldout_below: int
    cut: bool

    @property
    def directory(self) -> Path:
        return self.partial / "tokens"

    def is_done(self, number: int) -> bool:
        """Return whether corpus part `number` is already encoded.

        Returns False if a file of the part is missing or incomplete. Also returns False if the part
        was encoded with another `heldout_below` and may now have other held-out documents.
        """
        bytes_per_token = token_dtype(self.tokenizer.vocab_size).itemsize
        try:
            record = PartRecord.load(self.partial, number)
            for split in record.splits.values():
                for shard in split.shards:
                    file_bytes = (self.directory / shard.file).stat().st_size
                    if file_bytes != shard.tokens * bytes_per_token:
                        return False
        except (OSError, ValueError):
            return False
        if record.least is None or record.most is None:
            return True
        # Only documents with a hash between the old and the new limit change their split.
        low, high = sorted((self.heldout_below, record.below))
        may_change_splits = low < high and record.least < high and record.most >= low
        return not may_change_splits

    def work(self, number: int, counts: Counts, threads: int) -> None:
        # A worker of a killed parent may still write this part; such a worker ends within a second.
        with locked(self.partial / f"part-{number:05d}.lock"):
            counts.state[number] = READING
            if not self.is_done(number):
                self.encode(number, counts, threads)
        counts.state[number] = DONE

    def encode(self, number: int, counts: Counts, threads: int) -> None:
        """Encode corpus part `number` to token shards, then write the JSON record of this part.

        Shards of earlier attempts are overwritten. The tokenizer uses `threads` threads. Progress
        of this part is added to `counts`.
        """
        # The tokenizers library reads its number of threads from this variable.
        set_if_ours(os.environ, "RAYON_NUM_THREADS", str(threads))
        # Never "true": a process that is forked later would inherit this setting and wait forever
        # for threads that exist only in its parent.
        if threads == 1:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        writers: dict[str, ShardWriter] = {}
        for split in SPLITS:
            file_prefix = f"{split}-{number:05d}"
            writers[split] = ShardWriter(
                self.directory, file_prefix, self.tokenizer.vocab_size, self.corpus.has_prompts
            )
        is_last_part = number == len(self.corpus.parts) - 1
        skipped_empty = 0
        extreme_hashes: list[int] = []
        held = np.zeros(2, np.int64)
        following = np.zeros((0, 3), np.int64)
        for documents, blank in batches(self.corpus.parts[number]):
            skipped_empty += blank
            # The last batch is empty if only blank documents follow the last full batch.
            if not documents:
                continue
            hashes = document_hashes(documents)
            extreme_hashes += [int(hashes.min()), int(hashes.max())]
            is_heldout = hashes < self.heldout_below
            # Pieces of a single document are divided by their part, not by their hashes.
            if self.cut:
                is_heldout[:] = is_last_part
            token_counts = self.encode_batch(documents, is_heldout, writers, threads)
            rows = np.column_stack([hashes, np.ones_like(hashes), token_counts])
            held += rows[is_heldout, 1:].sum(axis=0)
            # Drop rows that cannot be needed, so that memory does not grow with the part.
            candidates = np.concatenate([following, rows[~is_heldout]])
            following = next_held_out(candidates, held)
            counts.text_bytes[number] += sum(document.predicted_bytes for document in documents)
            counts.tokens[number] += sum(token_counts)
        record = PartRecord(
            splits={split: writer.finish() for split, writer in writers.items()},
            skipped_empty=skipped_empty,
            below=self.heldout_below,
            least=min(extreme_hashes, default=None),
            most=max(extreme_hashes, default=None),
            following=following.tolist(),
        )
        # Only after the shards are on disk: a part with a record is not encoded again.
        replace_file(record_path(self.partial, number), json.dumps(asdict(record)))

    def encode_batch(
        self,
        documents: Sequence[Document],
        is_heldout: np.ndarray,
        writers: Mapping[str, ShardWriter],
        threads: int,
    ) -> list[int]:
        """Encode documents, append each to the shards of its split, and return their token counts.

        `is_heldout` (n,) bool contains the split of each document, and `writers` one writer per
        split.
        """
        tokens, sizes = self.tokens_of(documents, threads)
        for split, is_chosen in zip(SPLITS, (~is_heldout, is_heldout), strict=True):
            chosen = np.flatnonzero(is_chosen).tolist()
            chosen_tokens = [tokens[i] for i in chosen]
            ids = np.fromiter(chain.from_iterable(chosen_tokens), dtype=np.uint32)
            text_bytes = sum(documents[i].predicted_bytes for i in chosen)
            mask = None
            if self.corpus.has_prompts:
                mask = loss_mask([sizes[i] for i in chosen])
            writers[split].add(ids, text_bytes, len(chosen), mask)
        return [len(ids) for ids in tokens]

    def tokens_of(
        self, documents: Sequence[Document], threads: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Encode documents to token ids, and append an EOS to each document.

        Returns two lists with one entry per document: the token ids, and the token counts of the
        document's sections. Sections are alternately context and predicted text, and are
        encoded separately. The second list is empty if the corpus has no prompts.
        """
        texts = [document.text.decode() for document in documents]
        tokens = self.tokenizer.encode_batch(texts, threads)
        for ids in tokens:
            ids.append(self.tokenizer.eos_id)
        if not self.corpus.has_prompts:
            return tokens, []
        pieces = []
        for document in documents:
            pieces += [piece.decode() for piece in document.prompt]
        encoded_pieces = iter(self.tokenizer.encode_batch(pieces, threads))
        joined: list[list[int]] = []
        sizes: list[list[int]] = []
        for document, ids in zip(documents, tokens, strict=True):
            sections = list(islice(encoded_pieces, len(document.prompt)))
            # The first section is context; this section is empty for a document without a prompt.
            if not sections:
                sections.append([])
            sections.append(ids)
            joined.append(list(chain.from_iterable(sections)))
            sizes.append([len(section) for section in sections])
        return joined, sizes


def record_path(partial: Path, number: int) -> Path:
    return partial / f"part-{number:05d}.json"


def batches(part: Part) -> Iterator[tuple[list[Document], int]]:
    """Yield pairs (batch of documents, number of blank documents skipped since the previous batch).

    Raises DataError if the part is unreadable, or if UTF-8 cannot encode a document.
    """
    batch: list[Document] = []
    blank = 0
    size = 0
    for texts in part.read():
        for text, prompt in zip(texts.texts, texts.before, strict=True):
            if not text or text.isspace():
                blank += 1
                continue
            try:
                encoded_text = text.encode()
                encoded_prompt = tuple(piece.encode() for piece in prompt)
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{part.name}: a document has a character that UTF-8 cannot encode ({error}); "
                    "remove the character"
                ) from error
            batch.append(Document(encoded_text, encoded_prompt))
            size += len(text)
            if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                yield batch, blank
                batch = []
                size = 0
                blank = 0
    if batch or blank:
        yield batch, blank


def document_hashes(documents: Sequence[Document]) -> np.ndarray:
    """Return a hash of each document, (n,) int64: the first 8 bytes of the SHA-256, minus 2**63.

    The hashed content is all prompt pieces and the text of the document, joined by zero bytes.
    """
    hashes = np.empty(len(documents), np.int64)
    for i, document in enumerate(documents):
        content = b"\0".join((*document.prompt, document.text))
        digest = hashlib.sha256(content).digest()
        hashes[i] = int.from_bytes(digest[:8]) - HASH_OFFSET
    return hashes


def next_held_out(training: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Choose training documents to hold out, so that the held-out split reaches its minimum size.

    The minimum is LEAST_DOCUMENTS documents and LEAST_TOKENS tokens. Documents with the lowest
    hashes are chosen first. If the minimum cannot be reached, all documents are chosen. Returns an
    array with the same columns as `training` and one row per chosen hash, in ascending order.

    Args:
        training: (n, 3) int64 with the columns hash, number of documents with this hash, and number
            of tokens in these documents.
        held: (2,) int64, numbers of documents and tokens that are already held out.
    """
    hashes, places = np.unique(training[:, 0], return_inverse=True)
    counts = np.zeros((len(hashes), 2), np.int64)
    # Equal documents have equal hashes; `counts[places] +=` would count only one of them.
    np.add.at(counts, places, training[:, 1:])
    # The size of the held-out split before the documents of each hash are added.
    held_before = held + counts.cumsum(axis=0) - counts
    is_too_small = held_before < (LEAST_DOCUMENTS, LEAST_TOKENS)
    is_needed = is_too_small.any(axis=1)
    return np.column_stack([hashes, counts])[is_needed]


def loss_mask(sizes: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the loss mask of concatenated documents: (tokens,) bool, True for predicted tokens.

    `sizes[i]` contains the lengths in tokens of the sections of document i. The first section is
    context, the second is predicted text, and so on alternately.
    """
    lengths = np.fromiter(chain.from_iterable(sizes), dtype=np.int64)
    # Each document has an even number of sections, so the sections of all documents alternate.
    is_predicted = np.resize([False, True], len(lengths))
    return np.repeat(is_predicted, lengths)
