"""From a data config to token shards, which a cache keeps."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from diffllm.data.config import MIXTURE, TOKENS, DataConfig
from diffllm.data.corpus import Corpus, open_corpus
from diffllm.data.file_index import combined_hash
from diffllm.data.imported.prepared import prepare_tokens
from diffllm.data.mixture.naming import of_source
from diffllm.data.mixture.prepared import MixtureData, Prepared, config_of, open_source
from diffllm.data.progress import print_line
from diffllm.data.shards import FORMAT_VERSION
from diffllm.data.token_data import TokenData
from diffllm.data.tokenise import (
    available_cores,
    choose_heldout,
    cut_in_two,
    write_tokens,
)
from diffllm.data.tokenizer import Tokenizer
from diffllm.data.tokenizer_files import MODEL, located, write_tokenizer
from diffllm.data.train_tokenizer import TRAINING, train_tokenizer, training_sample
from diffllm.errors import DataError
from diffllm.files import build_once


def prepare(cfg: DataConfig) -> Prepared:
    """Return the token shards of `cfg`'s corpus, made if the cache does not hold them yet.

    Safe to call in any number of processes at once: one prepares, the others wait for it. To be
    called before process groups exist, for preparing can outlast their timeout.
    Raises ConfigError for a value that no corpus can satisfy, DataError for a corpus, tokenizer or
    cache directory that cannot be used.
    """
    cfg.validate()
    cache_dir = Path(cfg.cache_dir).expanduser()
    try:
        data: Prepared
        if cfg.source == MIXTURE:
            data = prepare_mixture(cfg, cache_dir)
        else:
            data = prepare_source(cfg, cache_dir)
        data.check()
        return data
    except OSError as error:
        raise DataError(f"data.cache_dir={cache_dir}: {error.strerror or error}") from error


def prepare_mixture(cfg: DataConfig, cache_dir: Path) -> MixtureData:
    """Prepare the sources of a mixture one by one, with one tokenizer.

    Where none is given it is trained on all of them, on as many bytes of each; weights, which may
    change on a run's way, have no part in it.
    """
    each = {name: config_of(cfg, source) for name, source in cfg.sources.items()}
    tokenizer = cfg.tokenizer
    if tokenizer is None:
        corpora = {name: open_source(name, own, cache_dir) for name, own in each.items()}
        size = -(-cfg.tokenizer_sample_bytes // len(corpora))
        texts = [(c, size) for c in sorted(corpora.values(), key=lambda corpus: corpus.identity)]
        what = [[corpus.identity for corpus, _ in texts], size, cfg.vocab_size, TRAINING]
        path = trained_tokenizer(cache_dir, combined_hash([MIXTURE, *what]))
        build_once(path.parent, partial(build_tokenizer, cfg, texts))
        tokenizer = str(path)
    sources = {
        name: of_source(name)(prepare_source)(replace(own, tokenizer=tokenizer), cache_dir)
        for name, own in each.items()
    }
    return MixtureData(sources)


def prepare_source(cfg: DataConfig, cache_dir: Path) -> TokenData:
    """Prepare one source: a tokenizer, unless one is given, and tokens, unless they are there."""
    if cfg.source == TOKENS:
        return prepare_tokens(cfg, cache_dir)
    corpus = open_corpus(cfg, cache_dir)
    if cfg.tokenizer is None:
        training = [corpus.identity, cfg.vocab_size, cfg.tokenizer_sample_bytes, TRAINING]
        tokenizer_key = combined_hash(training)[:32]
        tokenizer_path = trained_tokenizer(cache_dir, tokenizer_key)
    else:
        tokenizer_path = located(cfg.tokenizer)
        tokenizer_key = Tokenizer.from_file(tokenizer_path).pieces_hash
    key = combined_hash([FORMAT_VERSION, corpus.identity, tokenizer_key, cfg.heldout_fraction])

    def build(directory: Path) -> None:
        started = time.monotonic()
        print_line(f"preparing tokens: {corpus.description}, in {cache_dir}")
        parts = cut_in_two(corpus, cfg.heldout_fraction)
        texts, is_heldout = parts or (corpus, choose_heldout(corpus.load(), cfg.heldout_fraction))
        if cfg.tokenizer is None:
            sample = [(corpus, cfg.tokenizer_sample_bytes)]
            build_once(tokenizer_path.parent, partial(build_tokenizer, cfg, sample))
        write_tokenizer(tokenizer_path, directory)
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


def trained_tokenizer(cache_dir: Path, key: str) -> Path:
    """Return the place of a tokenizer that is trained here."""
    return cache_dir / "tokenizers" / key[:32] / MODEL


def build_tokenizer(cfg: DataConfig, texts: Sequence[tuple[Corpus, int]], directory: Path) -> None:
    """Train a tokenizer on corpora, so many bytes of each, and write it into a directory."""
    sample = (part for corpus, size in texts for part in training_sample(corpus.load(), size))
    model = train_tokenizer(sample, cfg.vocab_size, available_cores())
    (directory / MODEL).write_bytes(model)
