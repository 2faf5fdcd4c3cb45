"""One part of a corpus to token shards of its own, and a record of what they hold."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, compress
from pathlib import Path

import numpy as np

from diffllm.data.preparation.workers import Meter
from diffllm.data.shards import Shard, ShardWriter, Split
from diffllm.data.text.corpus import Part
from diffllm.data.tokenizer import Tokenizer
from diffllm.files import replace_file

BATCH_BYTES = 4_000_000
SPLITS = ("train", "heldout")
ALL_HASHES = 2**64


@dataclass(frozen=True)
class PartRecord:
    """What the shards of a part hold; it is written when they are complete."""

    splits: dict[str, Split]
    skipped_empty: int
    skipped_duplicates: int
    heldout_below: int
    """Documents whose hash is below this are held out."""
    least_hash: int | None
    most_hash: int | None
    """The range of the documents' hashes; None where there is no document."""

    @classmethod
    def load(cls, directory: Path, number: int) -> "PartRecord":
        """Read the record of a part."""
        stored = json.loads(record_path(directory, number).read_text())
        splits = {
            name: Split(**{**split, "shards": [Shard(**shard) for shard in split["shards"]]})
            for name, split in stored["splits"].items()
        }
        return cls(**{**stored, "splits": splits})

    def changes_with(self, below: int) -> bool:
        """Whether another hash below which documents are held out holds others out here."""
        low, high = sorted((below, self.heldout_below))
        if self.least_hash is None or self.most_hash is None or low == high:
            return False
        return self.least_hash < high and self.most_hash >= low


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
    left_out: Path | None
    """Directory of the documents that are left out, as `left_out_path` names them."""

    def is_done(self, number: int) -> bool:
        """Whether the shards of a part are complete."""
        return record_path(self.records, number).is_file()

    def encode(self, number: int, meter: Meter, threads: int) -> None:
        """Write the shards of a part, those of former attempts over, and then its record."""
        part = self.parts[number]
        writers = {
            split: ShardWriter(self.directory, f"{split}-{number:05d}", self.tokenizer.vocab_size)
            for split in SPLITS
        }
        repeated = np.load(left_out_path(self.left_out, number)) if self.left_out else None
        empty, seen, least, most = 0, 0, ALL_HASHES, -1
        for texts in batches(part):
            kept = [text for text in texts if text and not text.isspace()]
            empty += len(texts) - len(kept)
            places = range(seen, seen + len(kept))
            seen += len(kept)
            if repeated is not None:
                new = np.isin(places, repeated, invert=True, assume_unique=True)
                kept = list(compress(kept, new))
            if not kept:
                continue
            encoded = [text.encode() for text in kept]
            hashes = document_hashes(encoded)
            least, most = min(least, int(hashes.min())), max(most, int(hashes.max()))
            ids = self.tokenizer.encode_batch(kept, threads)
            for of_text in ids:
                of_text.append(self.tokenizer.eos_id)
            is_heldout = self.heldout(number, hashes)
            for split, chosen in zip(SPLITS, (~is_heldout, is_heldout), strict=True):
                mine = np.flatnonzero(chosen).tolist()
                writers[split].add(
                    np.fromiter(chain.from_iterable(ids[i] for i in mine), dtype=np.uint32),
                    sum(len(encoded[i]) for i in mine),
                    len(mine),
                )
            meter.add(sum(map(len, encoded)), sum(map(len, ids)))
        splits = {split: writer.finish() for split, writer in writers.items()}
        np.save(counts_path(self.records, number), writers["heldout"].counts)
        there = most >= 0
        record = PartRecord(
            splits=splits,
            skipped_empty=empty,
            skipped_duplicates=0 if repeated is None else len(repeated),
            heldout_below=self.heldout_below,
            least_hash=least if there else None,
            most_hash=most if there else None,
        )
        replace_file(record_path(self.records, number), json.dumps(asdict(record)))

    def heldout(self, number: int, hashes: np.ndarray) -> np.ndarray:
        """Choose the documents of a part that are held out, (n,) bool."""
        if self.last_is_heldout:
            return np.full(len(hashes), number == len(self.parts) - 1)
        return hashes < np.uint64(self.heldout_below)


def batches(part: Part) -> Iterator[list[str | None]]:
    """Yield the texts of a part, in order, in lists of about BATCH_BYTES."""
    batch: list[str | None] = []
    size = 0
    for documents in part.read():
        batch += documents.texts
        size += sum(len(text) for text in documents.texts if text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def document_hashes(texts: Sequence[bytes]) -> np.ndarray:
    """Return the first 8 bytes of the SHA-256 of texts, (n,) uint64."""
    return np.array([int.from_bytes(hashlib.sha256(t).digest()[:8]) for t in texts], np.uint64)


def left_out_path(directory: Path, number: int) -> Path:
    """Return the file of the documents of a part that are left out: their numbers among those that
    are more than blank, (n,) int64, rising."""
    return directory / f"left-out-{number:05d}.npy"


def record_path(directory: Path, number: int) -> Path:
    """Return the place of a part's record."""
    return directory / f"part-{number:05d}.json"


def counts_path(directory: Path, number: int) -> Path:
    """Return the place of the counts of tokens of a part's held-out split."""
    return directory / f"heldout-{number:05d}.npy"
