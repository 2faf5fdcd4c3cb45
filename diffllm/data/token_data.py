"""A prepared corpus on disk: manifest, tokenizer and token shards."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from diffllm.data.shards import Manifest
from diffllm.data.streams import Stream, TokenStream
from diffllm.data.tokenizer import Tokenizer, check_tokenizer, tokenizer_in


@dataclass(frozen=True)
class TokenData:
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
