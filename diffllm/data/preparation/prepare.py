"""From a data config to token shards, which a cache keeps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from diffllm.core.errors import DataError
from diffllm.core.files import build_once
from diffllm.data.config import MIXTURE, TOKENS, DataConfig
from diffllm.data.imported.prepared import prepare_tokens
from diffllm.data.mixture.naming import of_source
from diffllm.data.mixture.prepared import MixtureData, Prepared, config_of
from diffllm.data.preparation.config import PrepareConfig
from diffllm.data.preparation.single import cut_in_two
from diffllm.data.preparation.tokens import TokensJob, remove_unless_held
from diffllm.data.preparation.train_tokenizer import TRAINING, train_tokenizer, training_sample
from diffllm.data.preparation.workers import available_cores
from diffllm.data.shards import FORMAT_VERSION
from diffllm.data.text.corpus import Corpus, open_corpus
from diffllm.data.text.file_index import combined_hash
from diffllm.data.token_data import TokenData
from diffllm.data.tokenizer import Tokenizer
from diffllm.data.tokenizer_files import MODEL, check_tokenizer, located
from diffllm.data.waiting import said_if_long

DIVISION = "in parts"
"""How a corpus becomes shards; another way has other keys."""


def prepare(cfg: DataConfig, how: PrepareConfig | None = None) -> Prepared:
    """Return the token shards of `cfg`'s corpus, made if the cache does not hold them yet.

    Safe to call in any number of processes at once: one prepares, the others wait for it. To be
    called before process groups exist, for preparing can outlast their timeout.
    Raises ConfigError for a value that no corpus can satisfy, DataError for a corpus, tokenizer or
    cache directory that cannot be used.
    """
    cfg.validate()
    how = how or PrepareConfig()
    how.validate()
    cache_dir = Path(cfg.cache_dir).expanduser()
    try:
        data: Prepared
        if cfg.source == MIXTURE:
            data = prepare_mixture(cfg, cache_dir, how)
        else:
            data = prepare_source(cfg, cache_dir, how)
        data.check()
        return data
    except OSError as error:
        where = f"{error.filename}: " if error.filename not in (None, str(cache_dir)) else ""
        raise DataError(f"data.cache_dir={cache_dir}: {where}{error.strerror or error}") from error


def prepare_mixture(cfg: DataConfig, cache_dir: Path, how: PrepareConfig) -> MixtureData:
    """Prepare the sources of a mixture one by one, with one tokenizer.

    Where none is given it is trained on all of them, on as many bytes of each; weights, which may
    change on a run's way, have no part in it.
    """
    each = {name: config_of(cfg, source) for name, source in cfg.sources.items()}
    texts = {
        name: of_source(name)(open_corpus)(own, cache_dir)
        for name, own in each.items()
        if own.source != TOKENS
    }
    tokenizer = cfg.tokenizer
    if tokenizer is None:
        size = -(-cfg.tokenizer_sample_bytes // len(texts))
        names = sorted(texts, key=lambda name: texts[name].identity)
        what = [[texts[name].identity for name in names], size, cfg.vocab_size, TRAINING]
        sample = (
            part for name in names for part in under_name(name, training_sample(texts[name], size))
        )
        path = trained_tokenizer(cache_dir, combined_hash([MIXTURE, *what]))
        build_tokenizer(cfg, sample, path, list(texts.values()))
        tokenizer = str(path)
    own = {name: replace(each[name], tokenizer=tokenizer) for name in each}
    prepared: dict[str, TokenData] = {}
    for name in each:
        with of_source(name):
            if name in texts:
                prepared[name] = prepare_text(own[name], texts[name], cache_dir, how)
            else:
                prepared[name] = prepare_tokens(own[name], cache_dir)
    return MixtureData(prepared)


def prepare_source(cfg: DataConfig, cache_dir: Path, how: PrepareConfig) -> TokenData:
    """Prepare one source that stands alone."""
    if cfg.source == TOKENS:
        return prepare_tokens(cfg, cache_dir)
    return prepare_text(cfg, open_corpus(cfg, cache_dir), cache_dir, how)


def prepare_text(cfg: DataConfig, corpus: Corpus, cache_dir: Path, how: PrepareConfig) -> TokenData:
    """Prepare text: a tokenizer, unless one is given, and tokens, unless they are there."""
    if cfg.tokenizer is None:
        training = [corpus.identity, cfg.vocab_size, cfg.tokenizer_sample_bytes, TRAINING]
        tokenizer_key = combined_hash(training)[:32]
        tokenizer_path = trained_tokenizer(cache_dir, tokenizer_key)
    else:
        tokenizer_path = located(cfg.tokenizer)
        tokenizer_key = Tokenizer.from_file(tokenizer_path).pieces_hash
    what = [FORMAT_VERSION, DIVISION, corpus.identity, tokenizer_key, cfg.heldout_fraction]
    directory = cache_dir / "tokens" / combined_hash(what)[:32]
    if directory.is_dir():
        for partial in directory.parent.glob(f"{directory.name}.partial-*"):  # of a killed process
            remove_unless_held(partial)
        return TokenData(directory)
    halves = cut_in_two(corpus, cfg.heldout_fraction)
    if cfg.tokenizer is None:
        sample = training_sample(corpus, cfg.tokenizer_sample_bytes)
        build_tokenizer(cfg, sample, tokenizer_path, [corpus])
    TokensJob(
        corpus=halves or corpus,
        tokenizer=tokenizer_path,
        heldout_fraction=cfg.heldout_fraction,
        final=directory,
        cut=halves is not None,
        origin=corpus.place
        and combined_hash([corpus.place, cfg.tokenizer, cfg.vocab_size, cfg.heldout_fraction]),
    ).build(how)
    return TokenData(directory)


def trained_tokenizer(cache_dir: Path, key: str) -> Path:
    """Return the place of a tokenizer that is trained here."""
    return cache_dir / "tokenizers" / key[:32] / MODEL


def build_tokenizer(
    cfg: DataConfig, sample: Iterator[str], path: Path, corpora: Sequence[Corpus]
) -> None:
    """Train a tokenizer on a sample of text, unless it is there or another process does.

    Args:
        corpora: what the sample is of; DataError is raised where one has changed meanwhile.
    """

    def build(directory: Path) -> None:
        model = train_tokenizer(sample, cfg.vocab_size, available_cores())
        for corpus in corpora:
            corpus.check()
        (directory / MODEL).write_bytes(model)

    with said_if_long(f"the tokenizer {path}, which is trained"):
        build_once(path.parent, build)
    check_tokenizer(path)


def under_name(name: str, texts: Iterator[str]) -> Iterator[str]:
    """Yield texts of a source; errors name it."""
    with of_source(name):
        yield from texts
