"""Tokens of other libraries as a corpus: nothing is tokenised, and nothing copied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diffllm.core.errors import DataError
from diffllm.core.files import build_once
from diffllm.core.printing import to_stderr
from diffllm.data.config import DataConfig
from diffllm.data.imported.datatrove import open_datatrove
from diffllm.data.imported.files import Tokens, documents_in, ended, fingerprint
from diffllm.data.imported.megatron import open_megatron
from diffllm.data.joined import JoinedTokens, check_range
from diffllm.data.path_names import names_of
from diffllm.data.shards import MANIFEST, Manifest, Shard, Split
from diffllm.data.text.file_index import FileFacts, check_unchanged, combined_hash, file_facts
from diffllm.data.text.files import expand
from diffllm.data.token_data import TokenData
from diffllm.data.tokenizer import Tokenizer
from diffllm.data.tokenizer_files import located, write_tokenizer
from diffllm.data.verified import usable

FORMATS, TABLE = (".bin", ".ds"), ".parquet"
COUNTED = 1 << 22
"""Tokens that are counted at a time."""


class FilesStream:
    """A stretch of the tokens of several files, one behind the other; cheap to pickle."""

    masked = False

    def __init__(
        self,
        split: str,
        paths: Sequence[str],
        tokenizer: tuple[int, int],
        start: int,
        stop: int,
        indexes: Mapping[str, FileFacts] | None = None,
    ) -> None:
        """Open the files; raises DataError, also for an index that has changed.

        Args:
            tokenizer: pieces, and the one that ends a document.
            start, stop: the stretch, in tokens of all files together.
            indexes: the facts of index files when the tokens were prepared.
        """
        self.split, self.paths, self.tokenizer = split, list(paths), tokenizer
        self.start, self.stop, self.indexes = start, stop, dict(indexes or {})
        self.whole = JoinedTokens([open_tokens(Path(path), *tokenizer) for path in paths])
        for path, facts in self.indexes.items():  # after opening: an open array notices a change
            with usable(Path(path)):
                check_unchanged(Path(path), facts)

    def __len__(self) -> int:
        return self.stop - self.start

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop) of the stretch, (stop - start,) int64; raises DataError for one
        that is no piece of the tokenizer."""
        check_range(start, stop, len(self))
        return self.whole.tokens(self.start + start, self.start + stop)

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Return that all of tokens [start, stop) are to be predicted, (stop - start,) bool."""
        return np.ones(stop - start, np.bool_)

    def __reduce__(self) -> tuple[object, ...]:
        state = (self.split, self.paths, self.tokenizer, self.start, self.stop, self.indexes)
        return FilesStream, state


@dataclass(frozen=True)
class ImportedData(TokenData):
    """Files of tokens, whose end is held out; `directory` holds the tokenizer and the manifest."""

    paths: tuple[str, ...]
    """The files, which may have moved since they were counted."""
    indexes: dict[str, FileFacts]
    """The facts of their index files, by path."""
    former: str
    """The hash of the corpus without its index files, as older versions computed it."""

    @property
    def former_corpus(self) -> str:
        return self.former

    def split(self, name: str) -> FilesStream:
        """Open the tokens of "train" or "heldout"; raises DataError where files have changed."""
        manifest = self.manifest
        manifest.split(name)  # that there is
        train = manifest.splits["train"].tokens
        heldout = manifest.splits["heldout"].tokens
        start, stop = (0, train) if name == "train" else (train, train + heldout)
        tokenizer = manifest.vocab_size, manifest.eos_id
        stream = FilesStream(name, self.paths, tokenizer, start, stop, self.indexes)
        if len(stream.whole) != train + heldout:
            raise DataError(
                f"{', '.join(self.paths[:3])}: {len(stream.whole):,} tokens where "
                f"{train + heldout:,} were; delete {self.directory} to count them again"
            )
        return stream


def open_tokens(path: Path, vocab_size: int, eos_id: int) -> Tokens:
    """Open a file of tokens by its name, its documents with their ends; raises DataError."""
    if path.suffix == ".bin":
        return ended(open_megatron(path, vocab_size), eos_id)
    if path.suffix == ".ds":
        return ended(open_datatrove(path, vocab_size), eos_id)
    raise DataError(f"{path}: no file of tokens that is known: {', '.join(FORMATS)}")


def prepare_tokens(cfg: DataConfig, cache_dir: Path) -> TokenData:
    """Take the tokens of data.paths as they are; raises DataError.

    One directory with a manifest holds shards of ours, both splits of them.
    """
    if len(cfg.paths) == 1 and (Path(cfg.paths[0]).expanduser() / MANIFEST).is_file():
        return TokenData(Path(cfg.paths[0]).expanduser().absolute())
    if cfg.tokenizer is None:
        raise DataError("data=tokens needs data.tokenizer, the one that they were written with")
    tokenizer = Tokenizer.from_file(cfg.tokenizer)
    paths = list(dict.fromkeys(path for pattern in cfg.paths for path in expand(pattern)))
    tables = [path for path in paths if path.suffix == TABLE]
    paths = [path for path in paths if path.suffix in FORMATS]
    if tables and paths:
        raise DataError(f"data.paths: {TABLE} and {paths[0].suffix} files make two sources")
    if tables:
        from diffllm.data.imported.parquet import prepare_parquet

        return prepare_parquet(cfg, cache_dir, tables)
    if not paths:
        known = ", ".join((*FORMATS, TABLE))
        raise DataError(f"data.paths={cfg.paths}: none of {known}, and no directory of ours")
    prints = [fingerprint(path) for path in paths]
    names = tuple(map(str, paths))
    found = [index for path in paths for index in index_files(path)]
    facts = dict(zip(map(str, found), file_facts(found, cache_dir), strict=True))
    former = ["tokens", prints, cfg.heldout_fraction]
    corpus = combined_hash([*former, [each.sha256 for each in facts.values()]])
    key = combined_hash([corpus, tokenizer.pieces_hash])

    def build(directory: Path) -> None:
        write_tokenizer(located(str(cfg.tokenizer)), directory)
        counted(names, prints, tokenizer, cfg.heldout_fraction, corpus).save(directory)

    directory = cache_dir / "tokens" / key[:32]
    build_once(directory, build)
    return ImportedData(directory, names, facts, combined_hash(former))


def index_files(path: Path) -> list[Path]:
    """List the files that say where the documents of a file of tokens lie."""
    sisters = [path.with_suffix(".idx")]
    if path.suffix == ".ds":
        sisters = [path.with_name(f"{path.name}.{end}") for end in ("index", "metadata")]
    return [sister for sister in sisters if sister.is_file()]


def counted(
    paths: Sequence[str], prints: Sequence[str], tokenizer: Tokenizer, fraction: float, corpus: str
) -> Manifest:
    """Count files of tokens, and cut off the end of all, from the end of a document on, to be held
    out.

    Args:
        corpus: hash of all files and indexes.
    """
    from diffllm.data.heldout import end_behind  # imports torch, which a second start does without

    files = [open_tokens(Path(path), tokenizer.vocab_size, tokenizer.eos_id) for path in paths]
    whole = JoinedTokens(files)
    length = len(whole)
    cut = end_behind(whole, tokenizer.eos_id, max(0, int(length * (1 - fraction)) - 1))
    if cut >= length:
        raise DataError(
            f"{', '.join(map(str, paths[:3]))}: no document ends before the last "
            f"{fraction:.2g} of its tokens; a larger data.heldout_fraction holds out more"
        )
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for start in range(cut, length, COUNTED):
        part = whole.tokens(start, min(start + COUNTED, length))
        counts += np.bincount(part, minlength=len(counts))
    splits: dict[str, Split] = {}
    for name, start, stop in (("train", 0, cut), ("heldout", cut, length)):
        documents, shards = 0, []
        for number, first, last, _ in whole.spans(start, stop):
            if last > first:
                documents += documents_in(files[number], first, last)
                shards.append(Shard(Path(paths[number]).name, last - first, prints[number]))
        splits[name] = Split(documents, stop - start, 0, shards)
    if (ends := int(counts[tokenizer.eos_id])) != (documents := splits["heldout"].documents):
        what = f"held-out documents in the index contain {ends:,} end tokens"
        to_stderr(f"{documents:,} {what}; the documents of the index are counted")
    source = f"tokens of {names_of(paths)}"
    return Manifest.of(tokenizer, counts, source=source, corpus=corpus, splits=splits)
