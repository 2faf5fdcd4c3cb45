"""Prepared data on disk: one corpus, or a mixture of corpora that share one tokenizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from diffllm.core.errors import ConfigError, DataError
from diffllm.data.shards import Manifest, Split, together
from diffllm.data.streams import JoinedStream, Stream, TokenStream
from diffllm.data.text.file_index import combined_hash
from diffllm.data.tokenizer import Tokenizer, check_tokenizer, tokenizer_in


@contextmanager
def of_source(name: str) -> Iterator[None]:
    """In this context, prefix messages of ConfigError and DataError with "data.sources.NAME: "."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"data.sources.{name}: {error}") from error


@dataclass(frozen=True)
class TokenData:
    """One prepared corpus: manifest, tokenizer and token shards."""

    directory: Path

    @cached_property
    def manifest(self) -> Manifest:
        return Manifest.load(self.directory)

    @property
    def sources(self) -> "dict[str, TokenData]":
        return {}

    @property
    def directories(self) -> list[Path]:
        return [self.directory]

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(tokenizer_in(self.directory))

    def check(self) -> None:
        """Raise DataError if manifest, tokenizer or a shard is missing or has a wrong size."""
        for name in self.manifest.splits:
            self.split(name)
        check_tokenizer(tokenizer_in(self.directory))

    def split(self, name: str) -> Stream:
        """Open the tokens of the split `name`, "train" or "heldout".

        Raises DataError if a shard is missing or has a wrong size.
        """
        return TokenStream(self.directory, self.manifest, name)


@dataclass(frozen=True)
class MixtureData:
    """Several prepared corpora that share one tokenizer."""

    sources: dict[str, TokenData]

    @property
    def directory(self) -> Path:
        return next(iter(self.sources.values())).directory

    @property
    def directories(self) -> list[Path]:
        return [data.directory for data in self.sources.values()]

    @cached_property
    def manifest(self) -> Manifest:
        """Manifest of the mixture; each count is the sum of the counts of all sources.

        The corpus hash depends on the names and corpus hashes of all sources. The unigram entropy
        is the mean over the sources, weighted by the number of held-out tokens of each source.
        """
        manifests = [data.manifest for data in self.sources.values()]
        splits: dict[str, Split] = {}
        for split in manifests[0].splits:
            splits[split] = together([manifest.splits[split] for manifest in manifests])
        corpora = []
        notes = []
        entropies = []
        heldout_tokens = []
        skipped_empty = 0
        skipped_undecodable = 0
        is_cut = False
        for name, manifest in zip(self.sources, manifests, strict=True):
            corpora.append([name, manifest.corpus])
            if manifest.note:
                notes.append(f"{name}: {manifest.note}")
            entropies.append(manifest.heldout_unigram_entropy)
            heldout_tokens.append(manifest.splits["heldout"].tokens)
            skipped_empty += manifest.skipped_empty
            skipped_undecodable += manifest.skipped_undecodable
            is_cut = is_cut or manifest.cut
        mean_entropy = float(np.average(entropies, weights=heldout_tokens))
        # The other fields are equal, because `check` refuses sources with another tokenizer.
        return replace(
            manifests[0],
            source=f"a mixture of {', '.join(self.sources)}",
            corpus=combined_hash(corpora),
            skipped_empty=skipped_empty,
            skipped_undecodable=skipped_undecodable,
            heldout_unigram_entropy=mean_entropy,
            splits=splits,
            cut=is_cut,
            note="; ".join(notes),
        )

    def tokenizer(self) -> Tokenizer:
        return next(iter(self.sources.values())).tokenizer()

    def check(self) -> None:
        """Raise DataError if files of a source are missing, or if tokenizers of sources differ."""
        for name, data in self.sources.items():
            with of_source(name):
                data.check()
        hashes = {name: data.manifest.pieces_hash[:12] for name, data in self.sources.items()}
        if len(set(hashes.values())) > 1:
            raise DataError(
                "data.sources: all sources must use one tokenizer, but their tokenizers have the "
                f"hashes {hashes}; set data.tokenizer to the tokenizer that encoded the token "
                "sources"
            )

    def split(self, name: str) -> JoinedStream:
        return JoinedStream(name, [data.split(name) for data in self.sources.values()])


Prepared = TokenData | MixtureData
