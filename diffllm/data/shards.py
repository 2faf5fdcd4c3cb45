"""Token shards on disk: binary files of token ids, and a manifest with counts and checksums."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diffllm.core.errors import ConfigError
from diffllm.core.files import open_to_write, read_json, replace_file, sync
from diffllm.core.typed import made
from diffllm.data.tokenizer import Tokenizer
from diffllm.data.verified import usable
from diffllm.statistics.bootstrap import LEAST_DOCUMENTS

FORMAT_VERSION = 1
SHARD_TOKENS = 2**27
SPLITS = ("train", "heldout")
MANIFEST = "manifest.json"
LEAST_TOKENS, LARGEST_SHARE = 50_000, 0.2
"""With LEAST_DOCUMENTS, the minimum of the held-out split, up to LARGEST_SHARE of the corpus."""


@dataclass(frozen=True)
class Shard:
    file: str
    tokens: int
    sha256: str
    mask: str | None = None
    """File with a byte per token: 1 for a predicted token, 0 for context. None: all predicted."""
    mask_sha256: str | None = None


def bits_per_byte(nats: float, size: int) -> float | None:
    """Convert the loss of a text, in nats, to bits per byte of its UTF-8 size; None for size 0."""
    return nats / (math.log(2) * size) if size else None


@dataclass(frozen=True)
class Split:
    """Counts and shard files of the training split or the held-out split of a corpus."""

    documents: int
    tokens: int
    """Number of tokens, including context and one EOS per document."""
    bytes: int
    """UTF-8 size of the text of the predicted tokens; 0 if unknown."""
    shards: list[Shard]
    predicted: int | None = None
    """Number of predicted tokens (all except context); None: all tokens are predicted."""

    def bits_per_byte(self, loss: float) -> float | None:
        """Convert a loss in nats per token to bits per byte; None if the text size is unknown."""
        return bits_per_byte(loss * self.tokens * self.share_predicted, self.bytes)

    @property
    def share_predicted(self) -> float:
        return 1.0 if self.predicted is None else self.predicted / max(self.tokens, 1)

    @property
    def masked(self) -> bool:
        return any(shard.mask for shard in self.shards)

    def check(self, name: str) -> None:
        shard_tokens = [shard.tokens for shard in self.shards]
        counts = (self.documents, self.bytes, self.predicted or 0, *shard_tokens)
        if min(counts) < 0 or (self.predicted or 0) > self.tokens:
            raise ValueError(f"splits.{name}: counts must be at least 0; predicted at most tokens")
        if self.tokens != sum(shard_tokens):
            raise ValueError(f"splits.{name}: the tokens of shards must add up to {self.tokens}")
        for shard in self.shards:
            files = [shard.file] if not shard.mask else [shard.file, shard.mask]
            for file in files:
                # A forged manifest must not read files outside of its directory.
                if file and (Path(file).name != file or "\0" in file):
                    raise ValueError(f"shard {file} must be a file name without a directory")
            if (shard.mask is None) != (shard.mask_sha256 is None):
                raise ValueError(f"shard {shard.file} must have both mask and mask_sha256, or none")


@dataclass(frozen=True)
class Manifest:
    format_version: int
    source: str
    corpus: str
    pieces_hash: str
    vocab_size: int
    eos_id: int
    dtype: str
    """uint16 or uint32, little-endian."""
    skipped_empty: int
    skipped_undecodable: int
    heldout_unigram_entropy: float
    """Held-out loss in nats per token of the best model that ignores context."""
    splits: dict[str, Split]
    cut: bool = False
    """Whether the corpus is a single document with held-out pieces."""
    note: str = ""
    """Differences from a known reference; empty if none."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, heldout: np.ndarray, **fields: Any) -> "Manifest":
        """Create the manifest of a corpus that was encoded with `tokenizer`.

        Args:
            heldout: (vocab_size,) number of occurrences of each token id in the held-out split.
            fields: values of the other fields, by name.
        """
        return cls(
            format_version=FORMAT_VERSION,
            pieces_hash=tokenizer.pieces_hash,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            dtype=token_dtype(tokenizer.vocab_size).name,
            heldout_unigram_entropy=unigram_entropy(heldout),
            **{"skipped_empty": 0, "skipped_undecodable": 0, **fields},
        )

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read the manifest in `directory`.

        Raises DataError if the manifest is missing or invalid, or has another format version.
        """
        with usable(directory / MANIFEST, directory):
            content = read_json(directory / MANIFEST, follow=True)
            # Before the other fields, which another format may not have.
            version = content.get("format_version")
            if version != FORMAT_VERSION:
                raise ValueError(f"format {version}, expected {FORMAT_VERSION}")
            manifest = made(cls, content)
            manifest.check()
            return manifest

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise ConfigError(f"split={name!r} is not one of {', '.join(self.splits)}")
        return self.splits[name]

    def check(self) -> None:
        expected = token_dtype(self.vocab_size).name
        if self.dtype != expected:
            raise ValueError(f"dtype={self.dtype} must be {expected} for {self.vocab_size} pieces")
        if not 0 <= self.eos_id < self.vocab_size:
            raise ValueError(f"eos_id={self.eos_id} must be below vocab_size={self.vocab_size}")
        skipped = (self.skipped_empty, self.skipped_undecodable)
        if min(*skipped, self.heldout_unigram_entropy) < 0:
            raise ValueError("skipped_* and heldout_unigram_entropy must not be negative")
        check_split_counts(self.splits)

    def save(self, directory: Path) -> None:
        replace_file(directory / MANIFEST, json.dumps(asdict(self), indent=2) + "\n")


def check_split_counts(splits: Mapping[str, Split]) -> None:
    for name in SPLITS:
        if name not in splits:
            raise ValueError(f"splits.{name} is missing")
    for name, split in splits.items():
        split.check(name)


def together(splits: Sequence[Split]) -> Split:
    documents = tokens = text_bytes = predicted = 0
    shards: list[Shard] = []
    is_size_known = True
    for split in splits:
        documents += split.documents
        tokens += split.tokens
        text_bytes += split.bytes
        predicted += split.tokens if split.predicted is None else split.predicted
        shards += split.shards
        if split.tokens and not split.bytes:
            is_size_known = False
    is_masked = any(split.masked for split in splits)
    return Split(
        documents,
        tokens,
        text_bytes if is_size_known else 0,
        shards,
        predicted if is_masked else None,
    )


def thin_heldout(documents: int, tokens: int | None, key: str = "data.heldout_fraction") -> str:
    """Return a warning if the held-out split is below its minimum size, else an empty string.

    If `tokens` is None, only the number of documents is checked. The warning recommends increasing
    the config key `key`.
    """
    if documents >= LEAST_DOCUMENTS and (tokens is None or tokens >= LEAST_TOKENS):
        return ""
    counted = f"{documents:,} document" if documents == 1 else f"{documents:,} documents"
    if tokens is not None:
        counted += f" and {tokens:,} tokens"
    return (
        f"held-out text: only {counted} (minimum: {LEAST_DOCUMENTS} documents and "
        f"{LEAST_TOKENS:,} tokens), so a gap may not hold for other text; add text or increase "
        f"{key}"
    )


def unigram_entropy(counts: np.ndarray) -> float:
    """Return the entropy in nats of a token distribution.

    `counts`, (vocab_size,), contains the number of occurrences of each token id.
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class ShardWriter:
    """Writes the tokens of one split to shard files of at most SHARD_TOKENS tokens.

    All file names begin with `name`. If `masked` is true, a loss mask file is written per shard.
    """

    def __init__(self, directory: Path, name: str, vocab_size: int, masked: bool = False) -> None:
        self._directory = directory
        self._name = name
        self._masked = masked
        self._dtype = token_dtype(vocab_size)
        self._shards: list[Shard] = []
        self._files: list[HashedFile] = []
        self._tokens = self._predicted = self._documents = self._bytes = 0

    def add(
        self, tokens: np.ndarray, text_bytes: int, documents: int, mask: np.ndarray | None = None
    ) -> None:
        """Append whole documents to the shards.

        Args:
            tokens: (n,) token ids of any integer type, with one EOS per document.
            text_bytes: number of UTF-8 bytes of the predicted text.
            documents: number of documents in `tokens`.
            mask: (n,) bool, True for predicted tokens; required if the writer is `masked`.
        """
        if not len(tokens):
            return
        self._tokens += len(tokens)
        self._predicted += 0 if mask is None else int(mask.sum())
        self._documents += documents
        self._bytes += text_bytes
        rows: list[np.ndarray] = [tokens.astype(self._dtype)]
        if mask is not None:
            rows.append(mask.astype(np.uint8))
        while len(rows[0]):
            if not self._files:
                name = f"{self._name}-{len(self._shards):05d}"
                suffixes = [".bin", ".mask"] if self._masked else [".bin"]
                self._files = [HashedFile(self._directory / f"{name}{end}") for end in suffixes]
                self._written = 0
            # Tokens and mask are cut at the same positions, so their files correspond.
            room = SHARD_TOKENS - self._written
            for file, row in zip(self._files, rows, strict=True):
                file.write(row[:room])
            self._written += min(room, len(rows[0]))
            rows = [row[room:] for row in rows]
            if self._written == SHARD_TOKENS:
                self._close()

    def finish(self) -> Split:
        """Close the last shard file, sync it to disk, and return counts and shards of the split."""
        self._close()
        predicted = self._predicted if self._masked else None
        return Split(self._documents, self._tokens, self._bytes, self._shards, predicted)

    def _close(self) -> None:
        if self._files:
            (name, sha256), *mask_files = [file.close() for file in self._files]
            mask, mask_sha256 = mask_files[0] if mask_files else (None, None)
            self._shards.append(Shard(name, self._written, sha256, mask, mask_sha256))
            self._files = []


class HashedFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._file = os.fdopen(open_to_write(path), "wb")

    # The hash is computed while writing, which saves reading the file again.
    def write(self, content: np.ndarray) -> None:
        self._file.write(content.data)
        self._digest.update(content.data)

    def close(self) -> tuple[str, str]:
        """Close the file and sync it to disk; return its name and the SHA-256 of its content."""
        self._file.close()
        # Before a manifest names this file: after a power cut, a manifest implies its shards.
        sync(self._path)
        return self._path.name, self._digest.hexdigest()
