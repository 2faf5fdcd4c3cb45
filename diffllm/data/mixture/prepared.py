"""The prepared sources of a mixture: tokens of one tokenizer, each under a key of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from diffllm.data.config import DataConfig, SourceConfig, TextConfig
from diffllm.data.file_index import combined_hash
from diffllm.data.imported.prepared import ImportedData
from diffllm.data.shards import Manifest, Split, Stream
from diffllm.data.token_data import TokenData
from diffllm.data.tokenizer import Tokenizer
from diffllm.errors import DataError


@dataclass(frozen=True)
class MixtureData:
    """The prepared sources of a mixture by name; stands where `TokenData` does."""

    sources: dict[str, TokenData | ImportedData]

    @property
    def directory(self) -> Path:
        """A directory that holds the tokenizer of all of them."""
        return next(iter(self.sources.values())).directory

    @cached_property
    def manifest(self) -> Manifest:
        """Counts of all sources together, and a hash of their corpora under their names.

        The unigram entropy is the mean over held-out tokens of those of the sources: the loss of a
        model that knows a token's source alone.
        """
        each = {name: data.manifest for name, data in self.sources.items()}
        first, *others = each.values()
        heldout = [manifest.splits["heldout"].tokens for manifest in each.values()]
        entropies = [manifest.heldout_unigram_entropy for manifest in each.values()]
        return replace(
            first,
            source=f"a mixture of {', '.join(each)}",
            corpus=combined_hash([[name, manifest.corpus] for name, manifest in each.items()]),
            skipped_empty=sum(manifest.skipped_empty for manifest in each.values()),
            skipped_undecodable=sum(manifest.skipped_undecodable for manifest in each.values()),
            heldout_unigram_entropy=float(np.average(entropies, weights=heldout)),
            splits={
                name: together([manifest.splits[name] for manifest in each.values()])
                for name in first.splits
            },
            cut=any(manifest.cut for manifest in (first, *others)),
        )

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that all shards were written with."""
        return next(iter(self.sources.values())).tokenizer()

    def check(self) -> None:
        """Raise DataError unless the files of every source are there, of their sizes, and all are
        tokens of one tokenizer."""
        for data in self.sources.values():
            data.check()
        hashes = {name: data.manifest.pieces_hash for name, data in self.sources.items()}
        (first, own), *others = hashes.items()
        for name, other in others:
            if other != own:
                raise DataError(
                    f"data.sources: {first} and {name} are tokens of different tokenizers, "
                    f"{own[:12]} and {other[:12]}"
                )

    def split(self, name: str) -> "JoinedStream":
        """Open the tokens of "train" or "heldout" of all sources, one behind the other."""
        return JoinedStream(name, [data.split(name) for data in self.sources.values()])


Prepared = TokenData | ImportedData | MixtureData
"""What `prepare` returns: a corpus, tokens of other libraries, or several of these."""


class JoinedStream:
    """The tokens of several streams, one behind the other."""

    def __init__(self, split: str, streams: Sequence[Stream]) -> None:
        self.split, self.streams = split, list(streams)
        self.ends = np.cumsum([len(stream) for stream in streams], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop), (stop - start,) int64, across the borders of streams."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens [{start}, {stop}) of a stream of {len(self)}")
        parts = [np.zeros(0, np.int64)]
        place = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            first = int(self.ends[place]) - len(self.streams[place])
            end = min(stop, int(self.ends[place]))
            parts.append(self.streams[place].tokens(start - first, end - first))
            start, place = end, place + 1
        return np.concatenate(parts)

    @property
    def masked(self) -> bool:
        """Whether some tokens may be only context."""
        return any(stream.masked for stream in self.streams)

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Read which of tokens [start, stop) are to be predicted, (stop - start,) bool."""
        parts = [np.zeros(0, np.bool_)]
        for stream, end in zip(self.streams, self.ends.tolist(), strict=True):
            first = end - len(stream)
            if start < end and stop > first:
                parts.append(stream.loss_mask(max(start, first) - first, min(stop, end) - first))
        return np.concatenate(parts)


def together(splits: Sequence[Split]) -> Split:
    """The counts of one split of several sources."""
    return Split(
        documents=sum(split.documents for split in splits),
        tokens=sum(split.tokens for split in splits),
        bytes=sum(split.bytes for split in splits),
        shards=[shard for split in splits for shard in split.shards],
    )


def config_of(cfg: DataConfig, source: SourceConfig) -> DataConfig:
    """The config of one source as a corpus of its own."""
    text = {f.name: getattr(source, f.name) for f in fields(TextConfig)}
    return replace(cfg, **text, sources={}, curriculum=[])
