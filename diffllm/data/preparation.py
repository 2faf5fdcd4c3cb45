"""From a data config to token shards, which a cache keeps."""

import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from diffllm.data.config import DataConfig
from diffllm.data.corpus import open_corpus
from diffllm.data.file_index import combined_hash
from diffllm.data.progress import print_line
from diffllm.data.shards import FORMAT_VERSION, Manifest, TokenStream, again
from diffllm.data.tokenise import (
    TOKENIZER_FILE,
    available_cores,
    choose_heldout,
    cut_in_two,
    write_tokens,
)
from diffllm.data.tokenizer import Tokenizer
from diffllm.data.train_tokenizer import TRAINING, train_tokenizer
from diffllm.errors import DataError
from diffllm.files import build_once


@dataclass(frozen=True)
class TokenData:
    """A prepared corpus: `directory` holds its manifest, tokenizer and shards."""

    directory: Path

    @cached_property
    def manifest(self) -> Manifest:
        """Counts, hashes and shards; raises DataError if they cannot be read."""
        return Manifest.load(self.directory)

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that the shards were written with."""
        return Tokenizer.from_file(self.directory / TOKENIZER_FILE)

    def check(self) -> None:
        """Raise DataError unless manifest, tokenizer and every shard are there, of their sizes."""
        for name in self.manifest.splits:
            self.split(name)
        if not (self.directory / TOKENIZER_FILE).is_file():
            raise DataError(
                f"{self.directory / TOKENIZER_FILE}: no such file; {again(self.directory)}"
            )

    def split(self, name: str) -> TokenStream:
        """Open the tokens of "train" or "heldout"; raises DataError if a shard is damaged."""
        return TokenStream(self.directory, self.manifest, name)


def prepare(cfg: DataConfig) -> TokenData:
    """Return the token shards of `cfg`'s corpus, made if the cache does not hold them yet.

    Safe to call in any number of processes at once: one prepares, the others wait for it. To be
    called before process groups exist, for preparing can outlast their timeout.
    Raises ConfigError for a value that no corpus can satisfy, DataError for a corpus, tokenizer or
    cache directory that cannot be used.
    """
    cfg.validate()
    cache_dir = Path(cfg.cache_dir).expanduser()
    try:
        data = _prepare(cfg, cache_dir)
        data.check()
        return data
    except OSError as error:
        raise DataError(f"data.cache_dir={cache_dir}: {error.strerror or error}") from error


def _prepare(cfg: DataConfig, cache_dir: Path) -> TokenData:
    corpus = open_corpus(cfg, cache_dir)
    if cfg.tokenizer is None:
        training = [corpus.identity, cfg.vocab_size, cfg.tokenizer_sample_bytes, TRAINING]
        tokenizer_key = combined_hash(training)[:32]
        tokenizer_path = cache_dir / "tokenizers" / tokenizer_key / TOKENIZER_FILE
    else:
        tokenizer_path = Path(cfg.tokenizer).expanduser()
        tokenizer_key = Tokenizer.from_file(tokenizer_path).pieces_hash
    key = combined_hash([FORMAT_VERSION, corpus.identity, tokenizer_key, cfg.heldout_fraction])

    def build_tokenizer(directory: Path) -> None:
        model = train_tokenizer(
            corpus.load(), cfg.vocab_size, cfg.tokenizer_sample_bytes, available_cores()
        )
        (directory / TOKENIZER_FILE).write_bytes(model)

    def build(directory: Path) -> None:
        started = time.monotonic()
        print_line(f"preparing tokens: {corpus.description}, in {cache_dir}")
        parts = cut_in_two(corpus, cfg.heldout_fraction)
        texts, is_heldout = parts or (corpus, choose_heldout(corpus.load(), cfg.heldout_fraction))
        if cfg.tokenizer is None:
            build_once(tokenizer_path.parent, build_tokenizer)
        shutil.copyfile(tokenizer_path, directory / TOKENIZER_FILE)
        manifest = write_tokens(texts, is_heldout, directory, cut=parts is not None)
        train, heldout = manifest.splits["train"], manifest.splits["heldout"]
        print_line(
            f"prepared {train.tokens:,} training and {heldout.tokens:,} held-out tokens"
            f"{', the end of the one document,' * manifest.cut} "
            f"in {time.monotonic() - started:.0f} s"
        )

    directory = cache_dir / "tokens" / key[:32]
    build_once(directory, build)
    return TokenData(directory)
