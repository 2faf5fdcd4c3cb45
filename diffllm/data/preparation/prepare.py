"""Train the tokenizer and write the token shards of a data config, and cache the results."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from diffllm.core.atomic_directories import build_once
from diffllm.core.errors import DataError
from diffllm.core.machine import usable_cpus
from diffllm.core.printing import to_stderr
from diffllm.data.config import MIXTURE, TOKENS, DataConfig
from diffllm.data.imported import prepare_tokens
from diffllm.data.preparation.tokens import TokensJob
from diffllm.data.preparation.workers import PrepareConfig, work_through
from diffllm.data.prepared import MixtureData, Prepared, TokenData, of_source
from diffllm.data.shards import FORMAT_VERSION, LARGEST_SHARE, LEAST_TOKENS
from diffllm.data.text.corpus import Corpus, Part, TextsPart, open_corpus
from diffllm.data.text.file_index import combined_hash
from diffllm.data.text.skipped import report_again
from diffllm.data.tokenizer import FAST, MODEL, Tokenizer, check_tokenizer, located
from diffllm.statistics.bootstrap import LEAST_DOCUMENTS

DIVISION = "in parts"
PIECE = 500
"""Minimum characters of a held-out piece, if several pieces are held out."""
CHARACTERS_PER_TOKEN = 5
"""More than most tokenizers have, so that held-out pieces reach LEAST_TOKENS."""
WINDOW_BYTES = 4096
READ_FOR_SAMPLE = 8
MOST_SAMPLED = 64
"""The tokenizer's sample of a large corpus reads at most MOST_SAMPLED parts, and READ_FOR_SAMPLE
bytes per byte of the sample."""

# Llama's settings, except that line breaks may be part of a piece: a line break with indentation
# is then one or two tokens.
TRAINING: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "max_sentencepiece_length": 32,
    "max_sentence_length": 8 * WINDOW_BYTES,
    "unk_id": 0,
    "eos_id": 1,
    "bos_id": -1,
    "pad_id": -1,
}


class RunHashes(NamedTuple):
    """Hashes of the corpus and the tokenizer that an existing run has used; None if unknown."""

    corpus: str | None = None
    tokenizer: str | None = None


NEW_RUN = RunHashes()


def prepare(
    cfg: DataConfig, prepare_cfg: PrepareConfig | None = None, run_hashes: RunHashes = NEW_RUN
) -> Prepared:
    """Return the token shards that `cfg` describes; create missing shards first.

    An existing run needs the same tokens again, so its `run_hashes` have two effects. If an older
    version gave the corpus at data.paths the hash `run_hashes.corpus`, return the shards of that
    version from the cache; raise DataError if the cache no longer contains these shards. A
    tokenizer with the hash `run_hashes.tokenizer` is accepted even if texts can spell its EOS,
    which older versions allowed.

    Several processes may call this function at once: one process creates the shards, the others
    wait. Call this function before process groups exist, because preparation can exceed the timeout
    of a group. Raises ConfigError for an invalid config, and DataError for an unusable corpus,
    tokenizer or cache directory.
    """
    cfg.validate()
    prepare_cfg = prepare_cfg or PrepareConfig()
    prepare_cfg.validate()
    cache_dir = Path(cfg.cache_dir).expanduser()
    try:
        data: Prepared
        if cfg.source == MIXTURE:
            data = prepare_mixture(cfg, cache_dir, prepare_cfg, run_hashes)
        else:
            data = prepare_one(cfg, cache_dir, prepare_cfg, run_hashes)
        data.check()
        return data
    except OSError as error:
        # The message already contains the cache directory.
        is_other_file = error.filename not in (None, str(cache_dir))
        file = f"{error.filename}: " if is_other_file else ""
        raise DataError(f"data.cache_dir={cache_dir}: {file}{error.strerror or error}") from error


def prepare_mixture(
    cfg: DataConfig, cache_dir: Path, prepare_cfg: PrepareConfig, run_hashes: RunHashes
) -> MixtureData:
    """Prepare all sources of a mixture with one tokenizer.

    If data.tokenizer is null, a tokenizer is trained on the same number of bytes from each text
    source. The mixture weights do not affect this training.
    """
    source_configs = {name: cfg.for_source(source) for name, source in cfg.sources.items()}
    corpora: dict[str, Corpus] = {}
    for name, source_cfg in source_configs.items():
        if source_cfg.source != TOKENS:
            with of_source(name):
                corpora[name] = open_corpus(source_cfg, cache_dir)
    tokenizer = cfg.tokenizer
    if tokenizer is None:
        size = -(-cfg.tokenizer_sample_bytes // len(corpora))
        # Neither the names of the sources nor their order in the config may change the tokenizer.
        names = sorted(corpora, key=lambda name: corpora[name].identity)
        identities = [corpora[name].identity for name in names]

        def sample() -> Iterator[str]:
            for name in names:
                with of_source(name):
                    yield from training_sample(corpora[name], size)

        path = trained_tokenizer(cache_dir, [MIXTURE, identities, size, cfg.vocab_size, TRAINING])
        build_tokenizer(cfg, sample(), path, list(corpora.values()))
        tokenizer = str(path)
    prepared = {}
    for name, source_cfg in source_configs.items():
        with of_source(name):
            with_tokenizer = replace(source_cfg, tokenizer=tokenizer)
            # The corpus hash of the run is that of all sources together.
            of_source_only = run_hashes._replace(corpus=None)
            prepared[name] = prepare_one(with_tokenizer, cache_dir, prepare_cfg, of_source_only)
    return MixtureData(prepared)


def prepare_one(
    cfg: DataConfig, cache_dir: Path, prepare_cfg: PrepareConfig, run_hashes: RunHashes
) -> TokenData:
    if cfg.source == TOKENS:
        return prepare_tokens(cfg, cache_dir)
    corpus = open_corpus(cfg, cache_dir)
    former = run_hashes.corpus
    if former in corpus.former_identities and former != corpus.identity:
        _, former_directory = places(cfg, cache_dir, former)
        if former_directory.is_dir():
            return TokenData(former_directory)
        raise DataError(
            f"data.paths={', '.join(cfg.paths[:3])}: older versions read all kinds of files in a "
            f"directory, and data.cache_dir={cfg.cache_dir} no longer contains the tokens of this "
            "run; to create the tokens again, run diffllm prepare with all files of the run in "
            "data.paths, in the order of their paths"
        )
    tokenizer_path, directory = places(cfg, cache_dir, corpus.identity)
    if directory.is_dir():
        # Files that are skipped now may differ from those at the preparation.
        report_again(corpus.skipped, directory)
        return TokenData(directory)
    pieces = held_out_pieces(corpus, cfg.heldout_fraction)
    if cfg.tokenizer is None:
        sample = training_sample(corpus, cfg.tokenizer_sample_bytes)
        build_tokenizer(cfg, sample, tokenizer_path, [corpus])
    tokenizer = Tokenizer.from_file(tokenizer_path, cfg.eos_token)
    if tokenizer.spells_eos and tokenizer.pieces_hash != run_hashes.tokenizer:
        raise DataError(
            f"data.tokenizer={tokenizer_path}: the text {tokenizer.eos_token!r} encodes to the "
            "EOS, so a document that contains this text would be cut there; declare the EOS "
            f"special in {FAST}, or set data.eos_token to a special token"
        )
    if corpus.parts_for:
        corpus = replace(corpus, list_parts=partial(corpus.parts_for, tokenizer))
    job = TokensJob(
        pieces or corpus,
        tokenizer_path,
        cfg.heldout_fraction,
        directory,
        cut=bool(pieces),
        eos_token=cfg.eos_token,
    )
    job.build(prepare_cfg)
    return TokenData(directory)


def places(cfg: DataConfig, cache_dir: Path, identity: str) -> tuple[Path, Path]:
    """Return the tokenizer and the directory of token shards for the corpus with this hash."""
    if cfg.tokenizer is None:
        training = [identity, cfg.vocab_size, cfg.tokenizer_sample_bytes, TRAINING]
        tokenizer_path = trained_tokenizer(cache_dir, training)
        tokenizer_key = tokenizer_path.parent.name
    else:
        tokenizer_path = located(cfg.tokenizer)
        tokenizer_key = Tokenizer.from_file(tokenizer_path, cfg.eos_token).pieces_hash
    settings = [FORMAT_VERSION, DIVISION, identity, tokenizer_key, cfg.heldout_fraction]
    return tokenizer_path, cache_dir / "tokens" / combined_hash(settings)[:32]


def held_out_pieces(corpus: Corpus, fraction: float) -> Corpus | None:
    """Cut the text of a one-document corpus into training pieces and held-out pieces.

    Returns a corpus with these pieces, or None if `corpus` has prompts or several distinct
    documents. The held-out pieces are spread evenly over the text. Together they contain about
    `fraction` of the text, or more if the held-out split needs more for its minimum size. Raises
    DataError if the corpus has no text, consists of several equal documents or is too short to cut.
    """
    too_few = DataError(
        "the corpus has fewer than two distinct documents, so none can be held out; "
        "data.sample_by=paragraph cuts text files into more documents"
    )
    if corpus.has_prompts:
        return None
    # A large corpus is read only up to the first document that differs, usually the second.
    texts = corpus.texts()
    text = next(texts, None)
    if text is None:
        raise DataError(f"{corpus.description}: no document contains text; add documents with text")
    has_equal_documents = False
    for other in texts:
        if other != text:
            return None
        has_equal_documents = True
    if has_equal_documents:
        raise too_few
    least = min(LARGEST_SHARE, LEAST_TOKENS * CHARACTERS_PER_TOKEN / len(text))
    borders = held_out_borders(text, max(fraction, least))
    train: list[str] = []
    heldout: list[str] = []
    # The pieces alternate: the first is for training, the second is held out.
    for number, (start, stop) in enumerate(pairwise([0, *borders, len(text)])):
        piece = text[start:stop]
        if piece and not piece.isspace():
            pieces = heldout if number % 2 else train
            pieces.append(piece)
    if not train:
        raise too_few
    parts = [TextsPart("training pieces", train), TextsPart("held-out pieces", heldout)]
    # The new parts contain no blank document, so blank documents must be counted here.
    skipped_empty = corpus.skipped_empty
    for part in corpus.parts:
        for documents in part.read():
            skipped_empty += sum(not text or text.isspace() for text in documents.texts)
    return replace(corpus, list_parts=lambda: parts, skipped_empty=skipped_empty)


def held_out_borders(text: str, fraction: float) -> list[int]:
    """Return the borders of the held-out pieces of a text, as ascending character positions.

    The list contains start and end of each piece: start, end, start, end, ..., start. The last end
    is omitted, because the last piece extends to the end of the text. There are at most
    LEAST_DOCUMENTS pieces, and their ends are evenly spaced in the text. Together the pieces
    contain about `fraction` of the text.
    """
    end = len(text.rstrip())
    number = min(LEAST_DOCUMENTS, max(1, int(fraction * end) // PIECE))
    size = max(1, round(fraction * end / number))
    room = max(0, min(size, end // number - size))
    borders: list[int] = []
    for i in range(1, number + 1):
        stop = end * i // number
        borders.append(beginning_of_line(text, stop - size - room, stop - size))
        borders.append(beginning_of_line(text, stop - size // 2, stop))
    return borders[:-1]


def beginning_of_line(text: str, earliest: int, latest: int) -> int:
    """Return the last position in (earliest, latest] at which a line of `text` starts.

    If no line starts in this range, return the last position in the range at which a word starts.
    If no word starts there either, return `latest`.
    """
    for mark in "\n ":
        start = text.rfind(mark, max(0, earliest), latest) + 1
        if start:
            return start
    return latest


def trained_tokenizer(cache_dir: Path, settings: list[Any]) -> Path:
    return cache_dir / "tokenizers" / combined_hash(settings)[:32] / MODEL


def build_tokenizer(
    cfg: DataConfig, sample: Iterator[str], path: Path, corpora: Sequence[Corpus]
) -> None:
    """Train a tokenizer on the texts `sample` and save the model to `path`.

    An existing tokenizer is not trained again. `corpora` are the corpora that contain the texts.
    Raises DataError if the content of one of these corpora changes during training.
    """
    say = partial(to_stderr, f"training the tokenizer {path}")

    def train(directory: Path, _: int) -> None:
        (directory / MODEL).write_bytes(train_tokenizer(sample, cfg.vocab_size, usable_cpus()))

    def build(directory: Path) -> None:
        say()
        # A separate process, because sentencepiece blocks Python, which handles signals.
        work_through([0], partial(train, directory), 1, say, lambda: "text for the tokenizer")
        for corpus in corpora:
            corpus.check()

    build_once(path.parent, build)
    check_tokenizer(path)


def train_tokenizer(sample: Iterator[str], vocab_size: int, threads: int) -> bytes:
    """Train a sentencepiece model with exactly `vocab_size` pieces; return the serialised model.

    The pieces depend only on `sample` and `vocab_size`. Raises DataError if the texts do not allow
    this vocabulary size.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=sample,
            model_writer=model,
            vocab_size=vocab_size,
            num_threads=threads,
            minloglevel=2,
            **TRAINING,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2]
        raise DataError(
            f"data.vocab_size={vocab_size} does not fit this corpus; choose another value "
            f"(error of sentencepiece: {reason})"
        ) from error
    return model.getvalue()


def training_sample(corpus: Corpus, sample_bytes: int) -> Iterator[str]:
    """Yield short texts from a corpus, about `sample_bytes` in total, to train a tokenizer.

    The texts are spread evenly over the corpus. At most MOST_SAMPLED parts of the corpus are read.
    Only the beginning of a large part is read.
    """
    number = min(len(corpus.parts), MOST_SAMPLED)
    parts = [corpus.parts[i * len(corpus.parts) // number] for i in range(number)]
    limit = -(-READ_FOR_SAMPLE * sample_bytes // max(number, 1))
    # The texts are read twice, because even spacing needs their total size first.
    total = 0
    for part in parts:
        total += sum(len(text) for text in beginning(part, limit))
    windows = -(-min(sample_bytes, total) // WINDOW_BYTES)
    window = end = 0
    for part in parts:
        for text in beginning(part, limit):
            begin = end
            end += len(text)
            while window < windows:
                place = window * total // windows
                if place >= end:
                    break
                start = place - begin
                # A window may cut a character at either end; incomplete characters are ignored.
                yield text[start : start + WINDOW_BYTES].decode(errors="ignore")
                window += 1


def beginning(part: Part, limit: int) -> Iterator[bytes]:
    """Yield the encoded texts at the start of a part, until they have at least `limit` bytes.

    The last text can exceed the limit. A tokenizer is trained on a sample of these texts.
    """
    bytes_read = 0
    for documents in part.read():
        # A single prompt is a separate text; several pieces form one text with the document.
        texts: list[str | None] = []
        single_prompts: list[str] = []
        for pieces, text in zip(documents.before, documents.texts, strict=True):
            if len(pieces) > 1:
                texts.append("".join((*pieces, text or "")))
            else:
                texts.append(text)
                single_prompts += pieces
        for text in (*texts, *single_prompts):
            if not text:
                continue
            encoded = text.encode()
            yield encoded
            bytes_read += len(encoded)
            if bytes_read >= limit:
                return
