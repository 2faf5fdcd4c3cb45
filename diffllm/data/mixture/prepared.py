"""The prepared sources of a mixture: tokens of one tokenizer, each under a key of its own."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from diffllm.core.errors import DataError
from diffllm.data.config import DataConfig, SourceConfig, TextConfig
from diffllm.data.joined import JoinedStream
from diffllm.data.mixture.naming import of_source
from diffllm.data.shards import Manifest, together
from diffllm.data.text.file_index import combined_hash
from diffllm.data.token_data import TokenData
from diffllm.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class MixtureData:
    """The prepared sources of a mixture by name; stands where `TokenData` does."""

    sources: dict[str, TokenData]

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
            note="; ".join(f"{name}: {each[name].note}" for name in each if each[name].note),
        )

    @property
    def former_corpus(self) -> str:
        """The hash that older versions computed for the same corpora."""
        return combined_hash([[name, data.former_corpus] for name, data in self.sources.items()])

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that all shards were written with."""
        return next(iter(self.sources.values())).tokenizer()

    def check(self) -> None:
        """Raise DataError unless the files of every source are there, of their sizes, and all are
        tokens of one tokenizer."""
        for name, data in self.sources.items():
            with of_source(name):
                data.check()
        hashes = {name: data.manifest.pieces_hash for name, data in self.sources.items()}
        (first, own), *others = hashes.items()
        for name, other in others:
            if other != own:
                raise DataError(
                    f"data.sources: {first} and {name} are tokens of different tokenizers, "
                    f"{own[:12]} and {other[:12]}"
                )

    def split(self, name: str) -> JoinedStream:
        """Open the tokens of "train" or "heldout" of all sources, one behind the other."""
        return JoinedStream(name, [data.split(name) for data in self.sources.values()])


Prepared = TokenData | MixtureData
"""A prepared corpus, or several of them: `prepare` returns either."""


def config_of(cfg: DataConfig, source: SourceConfig) -> DataConfig:
    """The config of one source as a corpus of its own."""
    text = {f.name: getattr(source, f.name) for f in fields(TextConfig)}
    return replace(cfg, **text, sources={}, curriculum=[])
