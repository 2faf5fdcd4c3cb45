"""Token shards on disk: a manifest, flat binary files, and a stream that reads them."""

import hashlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from diffllm.core.errors import ConfigError, DataError
from diffllm.core.files import open_to_write, read_json, replace_file, sync
from diffllm.core.typed import made
from diffllm.data.file_array import FileArray
from diffllm.data.tokenizer import Tokenizer
from diffllm.data.verified import again, is_at, matches, usable

FORMAT_VERSION = 1
SHARD_TOKENS = 2**27
SPLITS = ("train", "heldout")
MOST_OPEN = 256
"""Files that a stream has open at a time: each takes a file descriptor."""
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """The record of one file of tokens."""

    file: str
    tokens: int
    sha256: str
    mask: str | None = None
    """A file with a byte for each token: 1 for one that is to be predicted, 0 for one that is only
    context. None where all are to be predicted."""
    mask_sha256: str | None = None


@dataclass(frozen=True)
class Split:
    """The counts of one split: bytes of its text in UTF-8; tokens with one EOS a document."""

    documents: int
    tokens: int
    bytes: int
    shards: list[Shard]
    predicted: int | None = None
    """Tokens that are to be predicted, whose text the bytes are of; None: all."""

    def bits_per_byte(self, loss: float) -> float | None:
        """Bits a byte of text of a loss in nats a token, by the mean bytes of a token here; None
        where the text is not known."""
        tokens = self.tokens * self.share_predicted
        return loss / math.log(2) * tokens / self.bytes if self.bytes else None

    @property
    def share_predicted(self) -> float:
        """The share of its tokens that are to be predicted."""
        return 1.0 if self.predicted is None else self.predicted / max(self.tokens, 1)

    @property
    def masked(self) -> bool:
        return any(shard.mask for shard in self.shards)

    def check(self, name: str) -> None:
        """Raise ValueError for counts that contradict each other and for files elsewhere."""
        counts = (self.documents, self.bytes, self.predicted or 0, *(s.tokens for s in self.shards))
        if min(counts) < 0 or (self.predicted or 0) > self.tokens:
            raise ValueError(f"splits.{name} has a count out of range")
        if self.tokens != sum(shard.tokens for shard in self.shards):
            raise ValueError(f"the shards of {name} do not have its {self.tokens} tokens")
        for shard in self.shards:
            for file in filter(None, (shard.file, shard.mask)):
                if Path(file).name != file or "\0" in file:
                    raise ValueError(f"shard {file} is not in this directory")
            if (shard.mask is None) != (shard.mask_sha256 is None):
                raise ValueError(f"shard {shard.file} has a mask without checksum, or none")


@dataclass(frozen=True)
class Manifest:
    """The record of a directory of token shards."""

    format_version: int
    source: str
    corpus: str
    """Hash that identifies the corpus."""
    pieces_hash: str
    vocab_size: int
    """Number of pieces of the tokenizer: every token is below it."""
    eos_id: int
    dtype: str
    """Type of a token on disk: uint16 or uint32, little-endian."""
    skipped_empty: int
    skipped_undecodable: int
    heldout_unigram_entropy: float
    """Loss in nats a token of the best model that ignores context, on the held-out split."""
    splits: dict[str, Split]
    cut: bool = False
    """True if the corpus is a single document, whose end is held out."""
    note: str = ""
    """How the corpus differs from a reference that is known; empty if it does not."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, heldout: np.ndarray, **more: Any) -> "Manifest":
        """Describe tokens of a tokenizer; heldout (vocab_size,) counts the held-out tokens."""
        return cls(
            format_version=FORMAT_VERSION,
            pieces_hash=tokenizer.pieces_hash,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            dtype=token_dtype(tokenizer.vocab_size).name,
            heldout_unigram_entropy=entropy(heldout),
            **{"skipped_empty": 0, "skipped_undecodable": 0, **more},
        )

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read `directory`'s manifest; DataError if it is unreadable or of another version."""
        with usable(directory / MANIFEST, directory):
            content = read_json(directory / MANIFEST, follow=True)
            if (version := content.get("format_version")) != FORMAT_VERSION:
                raise ValueError(f"format {version}, expected {FORMAT_VERSION}")
            manifest = made(cls, content)
            manifest.check()
            return manifest

    def split(self, name: str) -> Split:
        """Return the split of this name; raises ConfigError where there is none."""
        if name not in self.splits:
            raise ConfigError(f"split={name!r} is not one of {', '.join(self.splits)}")
        return self.splits[name]

    def check(self) -> None:
        """Raise ValueError for a manifest that contradicts itself or names files elsewhere."""
        if self.dtype != token_dtype(self.vocab_size).name:
            raise ValueError(f"dtype {self.dtype} does not go with {self.vocab_size} pieces")
        if not 0 <= self.eos_id < self.vocab_size:
            raise ValueError(f"eos_id={self.eos_id} must be below vocab_size={self.vocab_size}")
        skipped = (self.skipped_empty, self.skipped_undecodable)
        if min(*skipped, self.heldout_unigram_entropy) < 0:
            raise ValueError("skipped_* and heldout_unigram_entropy must not be negative")
        check_splits(self.splits)

    def save(self, directory: Path) -> None:
        replace_file(directory / MANIFEST, json.dumps(asdict(self), indent=2) + "\n")


def check_splits(splits: Mapping[str, Split]) -> None:
    """Raise ValueError if a split is missing or contradicts itself."""
    if missing := [name for name in SPLITS if name not in splits]:
        raise ValueError(f"splits.{missing[0]} is missing")
    for name, split in splits.items():
        split.check(name)


def together(splits: Sequence[Split]) -> Split:
    """Sum up one split of several sources or parts; no bytes where those of one are not known."""
    known = all(split.bytes for split in splits if split.tokens)
    return Split(
        documents=sum(split.documents for split in splits),
        tokens=sum(split.tokens for split in splits),
        bytes=sum(split.bytes for split in splits) if known else 0,
        shards=[shard for split in splits for shard in split.shards],
        predicted=sum(s.tokens if s.predicted is None else s.predicted for s in splits)
        if any(split.masked for split in splits)
        else None,
    )


def entropy(counts: np.ndarray) -> float:
    """Compute the entropy, in nats, of the distribution that counts (vocab_size,) describe."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest type that holds every token, little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


Numbers = np.ndarray | FileArray


class Stream(Protocol):
    """Tokens that can be read at any place."""

    split: str

    @property
    def masked(self) -> bool:
        """Whether some tokens may be only context."""

    def __len__(self) -> int:
        """Count the tokens."""

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), (stop - start,) int64."""

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Read which of tokens [start, stop) are to be predicted, (stop - start,) bool."""


def as_targets(stream: Stream, start: int, tokens: np.ndarray) -> np.ndarray:
    """Return the tokens of a stream from `start` on, (n,) int64, as targets: -1 for those that are
    only context."""
    if not stream.masked:
        return tokens
    return np.where(stream.loss_mask(start, start + len(tokens)), tokens, -1)


class ShardWriter:
    """Writes tokens of one split in shards of at most SHARD_TOKENS, cutting documents if need be.

    Args:
        name: what the names of its files begin with.
        masked: whether a loss mask is written beside each shard.
    """

    def __init__(self, directory: Path, name: str, vocab_size: int, masked: bool = False) -> None:
        self._directory, self._name, self._masked = directory, name, masked
        self._dtype = token_dtype(vocab_size)
        self._shards: list[Shard] = []
        self._files: list[HashedFile] = []
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        """Occurrences of each token that is to be predicted so far, (vocab_size,)."""
        self.tokens = 0
        self.documents = 0
        self.bytes = 0

    def add(
        self, tokens: np.ndarray, text_bytes: int, documents: int, mask: np.ndarray | None = None
    ) -> None:
        """Append tokens of texts that end `documents` documents, each with its EOS.

        Args:
            tokens: (n,), of any integer type.
            text_bytes: bytes of the texts that are to be predicted.
            mask: (n,) bool, True for tokens that are to be predicted; where there are masks.
        """
        if not len(tokens):
            return
        predicted = tokens if mask is None else tokens[mask]
        self.counts += np.bincount(predicted, minlength=len(self.counts))
        self.tokens += len(tokens)
        self.documents += documents
        self.bytes += text_bytes
        rows = [tokens.astype(self._dtype), *([] if mask is None else [mask.astype(np.uint8)])]
        while len(rows[0]):
            if not self._files:
                self._open()
            room = SHARD_TOKENS - self._written
            for file, row in zip(self._files, rows, strict=True):
                file.write(row[:room])
            self._written += min(room, len(rows[0]))
            rows = [row[room:] for row in rows]
            if self._written == SHARD_TOKENS:
                self._close()

    def finish(self) -> Split:
        """Close the last shard, which outlives a power cut from now on, and describe the split."""
        self._close()
        predicted = int(self.counts.sum()) if self._masked else None
        return Split(self.documents, self.tokens, self.bytes, self._shards, predicted)

    def _open(self) -> None:
        name = f"{self._name}-{len(self._shards):05d}"
        ends = [".bin", ".mask"] if self._masked else [".bin"]
        self._files = [HashedFile(self._directory / f"{name}{end}") for end in ends]
        self._written = 0

    def _close(self) -> None:
        if self._files:
            (name, sha256), *masks = (file.close() for file in self._files)
            mask, mask_sha256 = masks[0] if masks else (None, None)
            self._shards.append(Shard(name, self._written, sha256, mask, mask_sha256))
            self._files = []


class HashedFile:
    """A file that is hashed as it is written."""

    def __init__(self, path: Path) -> None:
        self._path, self._digest = path, hashlib.sha256()
        self._file = os.fdopen(open_to_write(path), "wb")

    def write(self, content: np.ndarray) -> None:
        self._file.write(content.data)
        self._digest.update(content.data)

    def close(self) -> tuple[str, str]:
        """Put it on disk; return its name and its SHA-256."""
        self._file.close()
        sync(self._path)
        return self._path.name, self._digest.hexdigest()


class TokenStream:
    """The tokens of one split, read where they lie; cheap to pickle into loader processes.

    Sizes are compared with the manifest at once, checksums when a shard is first read.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str) -> None:
        """Open the shards; raises DataError if one is missing or its size is not the manifest's."""
        self.split = split
        self._directory = directory
        self._shards = manifest.split(split).shards
        self._dtype = token_dtype(manifest.vocab_size)
        self._ends = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)
        self._open: OrderedDict[str, FileArray] = OrderedDict()
        self.masked = manifest.splits[split].masked
        for shard in self._shards:
            self._check(shard.file, shard.tokens * self._dtype.itemsize)
            if shard.mask:
                self._check(shard.mask, shard.tokens)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), (stop - start,) int64, across shard borders."""
        return self._read(start, stop, np.dtype(np.int64), self._tokens)

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Read which of tokens [start, stop) are to be predicted, (stop - start,) bool."""
        return self._read(start, stop, np.dtype(np.bool_), self._mask)

    def _read(
        self, start: int, stop: int, dtype: np.dtype[Any], content: Callable[[Shard], Numbers]
    ) -> np.ndarray:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens [{start}, {stop}) of a stream of {len(self)}")
        out = np.empty(stop - start, dtype)
        filled, number = 0, int(np.searchsorted(self._ends, start, side="right"))
        while filled < len(out):
            shard = self._shards[number]
            offset = start + filled - int(self._ends[number] - shard.tokens)
            part = content(shard)[offset : offset + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled, number = filled + len(part), number + 1
        return out

    def _tokens(self, shard: Shard) -> Numbers:
        return self._array(shard.file, shard.tokens, self._dtype, shard.sha256)

    def _mask(self, shard: Shard) -> Numbers:
        if shard.mask is None or shard.mask_sha256 is None:
            return np.broadcast_to(np.True_, shard.tokens)
        return self._array(shard.mask, shard.tokens, np.dtype(np.uint8), shard.mask_sha256)

    def _array(self, file: str, tokens: int, dtype: np.dtype[Any], sha256: str) -> FileArray:
        if file not in self._open:
            self._check(file, tokens * dtype.itemsize)
            path, advice = self._directory / file, f"; {again(self._directory)}"
            array = FileArray(path, dtype, count=tokens, advice=advice)
            self._check(file, tokens * dtype.itemsize, sha256)
            if not is_at(path, array.identity):
                raise DataError(f"{path}: replaced while it was compared{advice}")
            self._open[file] = array
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        return self._open[file]

    def _check(self, file: str, expected: int, sha256: str | None = None) -> None:
        path = self._directory / file
        problem: str | None = None
        try:
            actual = path.stat().st_size
            if not path.is_file():
                problem = "not a file"
            elif actual != expected:
                problem = f"{actual} bytes where the manifest says {expected}"
            elif sha256 and not matches(path, sha256):
                problem = f"damaged, its sha256 is not the manifest's {sha256[:12]}..."
        except FileNotFoundError as error:
            problem = error.strerror
        except OSError as error:  # of this machine, and not of the shard
            raise DataError(f"{path}: {error.strerror or error}") from error
        if problem:
            raise DataError(f"{path}: {problem}; {again(self._directory)}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}
