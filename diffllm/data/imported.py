"""Use token files of other libraries (Megatron, datatrove) as a corpus, without a copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from diffllm.core.atomic_directories import build_once
from diffllm.core.errors import DataError
from diffllm.data.config import DataConfig
from diffllm.data.prepared import TokenData
from diffllm.data.shards import LARGEST_SHARE, LEAST_TOKENS, MANIFEST, Manifest, Shard, Split
from diffllm.data.streams import JoinedTokens, check_range, document_end, spans, token_counts
from diffllm.data.text.file_index import (
    FileFacts,
    check_unchanged,
    combined_hash,
    file_facts,
    names_of,
)
from diffllm.data.text.local_files import paths_of
from diffllm.data.text.skipped import Skipped, report_again, report_skipped
from diffllm.data.token_files import (
    OPENERS,
    documents_in,
    fingerprint,
    index_files,
    open_tokens,
)
from diffllm.data.tokenizer import Tokenizer, located, write_tokenizer
from diffllm.data.verified import usable


@dataclass(eq=False)
class FilesStream:
    """Tokens [start, stop) of the concatenated token files `paths`.

    `tokenizer` is (vocabulary size, EOS id). `indexes` contains the size and hash of each index
    file, by path, as they were in `prepare_tokens`. The constructor raises DataError if a token
    file is unusable or an index file has changed.
    """

    split: str
    paths: Sequence[str]
    tokenizer: tuple[int, int]
    start: int
    stop: int
    """Range [start, stop) in the tokens of all files."""
    indexes: Mapping[str, FileFacts] = field(default_factory=dict)
    masked = False

    def __post_init__(self) -> None:
        files = [open_tokens(Path(path), *self.tokenizer) for path in self.paths]
        self.joined = JoinedTokens(files)
        # Changes after this check are detected by the open arrays.
        for path, facts in self.indexes.items():
            with usable(Path(path)):
                check_unchanged(Path(path), facts)

    def __len__(self) -> int:
        return self.stop - self.start

    def tokens(self, start: int, stop: int) -> np.ndarray:
        check_range(start, stop, len(self))
        return self.joined.tokens(self.start + start, self.start + stop)

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        return np.ones(stop - start, np.bool_)

    def __reduce__(self) -> tuple[object, ...]:
        return FilesStream, tuple(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True)
class ImportedData(TokenData):
    """Corpus of the token files `paths`; the cache contains only the tokenizer and the manifest.

    `indexes` maps the path of each index file of a token file to the size and hash that
    `prepare_tokens` found.
    """

    paths: tuple[str, ...]
    indexes: dict[str, FileFacts]

    def split(self, name: str) -> FilesStream:
        """Open the tokens of the split `name`, "train" or "heldout".

        Raises DataError if an index file has changed since `prepare_tokens`, or if the number of
        tokens differs from the manifest.
        """
        manifest = self.manifest
        # Raises ConfigError for an unknown name.
        manifest.split(name)
        train = manifest.splits["train"].tokens
        total = train + manifest.splits["heldout"].tokens
        start, stop = (0, train) if name == "train" else (train, total)
        tokenizer = manifest.vocab_size, manifest.eos_id
        stream = FilesStream(name, self.paths, tokenizer, start, stop, self.indexes)
        if len(stream.joined) != total:
            raise DataError(
                f"{', '.join(self.paths[:3])}: the number of tokens was {total:,} in the first "
                f"run, but is now {len(stream.joined):,}; restore the original files, or delete "
                f"{self.directory} to count the tokens again"
            )
        return stream


def prepare_tokens(cfg: DataConfig, cache_dir: Path) -> TokenData:
    """Open the corpus at data.paths: token files, or one directory of diffllm token shards.

    For token files, the first call counts the tokens and stores the counts in `cache_dir`. Raises
    DataError if a file is missing or unusable, if token files are used without data.tokenizer, or
    if data.eos_token is not the EOS of the token shards.
    """
    shards = token_shards(cfg)
    if shards is not None:
        return shards
    if cfg.tokenizer is None:
        raise DataError(
            "data.tokenizer=null is not supported with data=tokens; set data.tokenizer to the "
            "tokenizer that encoded the tokens"
        )
    tokenizer = Tokenizer.from_file(cfg.tokenizer, cfg.eos_token)
    paths, skipped = token_paths(cfg)
    fingerprints = [fingerprint(path) for path in paths]
    indexes = []
    for path in paths:
        indexes += index_files(path)
    facts = dict(zip(map(str, indexes), file_facts(indexes, cache_dir), strict=True))
    index_hashes = [index_facts.sha256 for index_facts in facts.values()]
    # Token files can be too large to hash, so their fingerprints contain only samples. Index files
    # are smaller and hashed completely.
    corpus = combined_hash(["tokens", fingerprints, cfg.heldout_fraction, index_hashes])
    directory = cache_dir / "tokens" / combined_hash([corpus, tokenizer.pieces_hash])[:32]

    def build(scratch: Path) -> None:
        report_skipped(skipped, scratch, directory)
        write_tokenizer(located(str(cfg.tokenizer)), scratch, cfg.eos_token)
        manifest = manifest_of(paths, fingerprints, tokenizer, cfg.heldout_fraction, corpus)
        manifest.save(scratch)

    if directory.is_dir():
        report_again(skipped, directory)
    build_once(directory, build)
    return ImportedData(directory, tuple(map(str, paths)), facts)


def token_shards(cfg: DataConfig) -> TokenData | None:
    """Return the directory of diffllm token shards at data.paths; None for other paths.

    Raises DataError if data.eos_token is not the EOS of the token shards.
    """
    if len(cfg.paths) != 1:
        return None
    directory = Path(cfg.paths[0]).expanduser()
    if not (directory / MANIFEST).is_file():
        return None
    shards = TokenData(directory.absolute())
    if cfg.eos_token is not None and cfg.eos_token != shards.tokenizer().eos_token:
        raise DataError(
            f"data.eos_token={cfg.eos_token} cannot change the EOS "
            f"{shards.tokenizer().eos_token!r} of the tokens in {shards.directory}; remove "
            "data.eos_token, or prepare the texts again with this EOS"
        )
    return shards


def token_paths(cfg: DataConfig) -> tuple[list[Path], Skipped]:
    """Return the token files that data.paths lists or finds, and the skipped files with reasons.

    Raises DataError if there is no token file, or if a file that data.paths lists has another
    format.
    """
    local_files = paths_of(cfg)
    roots = local_files.roots
    skipped = dict(local_files.skipped)
    # Files that data.paths lists are checked below; of directories, only token files are used.
    paths = [path for path, root in roots.items() if root is None or path.suffix in OPENERS]
    if not paths:
        raise DataError(
            f"data.paths={cfg.paths[0]} contains no {' or '.join(OPENERS)} file; "
            "for text files, set data=files"
        )
    index_paths: set[Path] = set()
    for path in paths:
        if path.suffix in OPENERS:
            index_paths.update(index_files(path))
    for path, root in roots.items():
        if root and path.suffix not in OPENERS and path not in index_paths:
            skipped[path] = f"not a {' or '.join(OPENERS)} file"
    paths = [path for path in paths if path not in index_paths]
    unsupported = [path for path in paths if path.suffix not in OPENERS]
    if unsupported:
        raise DataError(
            f"data.paths: {unsupported[0]} is neither a {' or '.join(OPENERS)} file nor a "
            f"directory with {MANIFEST}"
        )
    return paths, skipped


def manifest_of(
    paths: Sequence[Path],
    fingerprints: Sequence[str],
    tokenizer: Tokenizer,
    fraction: float,
    corpus_hash: str,
) -> Manifest:
    """Count tokens and documents of token files, and return the manifest of the corpus.

    The documents that begin in the last `fraction` of all tokens are held out. A small corpus uses
    a larger fraction, so that the held-out split has enough tokens. Raises DataError if no document
    can be held out. The manifest stores `fingerprints`, one hash per file.
    """
    files = [open_tokens(path, tokenizer.vocab_size, tokenizer.eos_id) for path in paths]
    joined = JoinedTokens(files)
    length = len(joined)
    least_share = min(LARGEST_SHARE, LEAST_TOKENS / max(length, 1))
    share = max(fraction, least_share)
    # The cut is at the end of a document, so that no document is in both splits.
    place = max(0, int(length * (1 - share)) - 1)
    cut = document_end(joined, tokenizer.eos_id, place)
    if cut >= length:
        raise DataError(
            f"{', '.join(map(str, paths[:3]))}: no document can be held out, because none begins "
            f"in the last {share:.2%} of the tokens; set data.heldout_fraction above {share:.4g}"
        )
    counts = token_counts(joined.tokens, cut, length, tokenizer.vocab_size)
    splits: dict[str, Split] = {}
    for name, start, stop in (("train", 0, cut), ("heldout", cut, length)):
        documents = 0
        shards: list[Shard] = []
        for number, first, last in spans(joined.ends, start, stop):
            if last > first:
                documents += documents_in(files[number], first, last)
                shard = Shard(paths[number].name, last - first, fingerprints[number])
                shards.append(shard)
        splits[name] = Split(documents, stop - start, 0, shards)
    source = f"tokens of {names_of([path.name for path in paths])}"
    return Manifest.of(tokenizer, counts, source=source, corpus=corpus_hash, splits=splits)
