"""A corpus of documents, divided into parts that separate processes can read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from diffllm.core.errors import DataError
from diffllm.core.registry import SOURCES
from diffllm.data.config import DataConfig
from diffllm.data.text.file_index import combined_hash
from diffllm.data.text.skipped import Skipped
from diffllm.data.tokenizer import Tokenizer

ROWS = 256
TEXT_TYPES = ("string", "large_string", "string_view")


class TextBatch(NamedTuple):
    """Consecutive documents of a corpus.

    Attributes:
        texts: text of each document; None if the text is missing.
        prompts: the prompt before each text. For a corpus without prompts, `prompts` is None. A
            missing prompt is also None. Any other prompt is a string or a sequence of strings. Such
            a sequence alternates between context and predicted text; it begins and ends with
            context.
    """

    texts: list[str | None]
    prompts: Sequence[str | Sequence[str] | None] | None = None

    @property
    def before(self) -> list[tuple[str, ...]]:
        if self.prompts is None:
            return [()] * len(self.texts)
        pieces: list[tuple[str, ...]] = []
        for prompt in self.prompts:
            if not prompt:
                pieces.append(())
            elif isinstance(prompt, str):
                pieces.append((prompt,))
            else:
                pieces.append(tuple(prompt))
        return pieces


@dataclass(frozen=True)
class Part:
    """Consecutive documents of a corpus, read by one process.

    Attributes:
        size: estimated bytes of text; 0 if unknown.
        read: yields the documents in order; may raise DataError.
    """

    name: str
    size: int
    read: Callable[[], Iterator[TextBatch]]


@dataclass(frozen=True)
class Corpus:
    """A collection of documents, which are read only when needed.

    Attributes:
        identity: hash of the content and of the settings that divide it into documents.
        former_identities: hashes that older versions gave a corpus of the same paths.
        list_parts: lists the parts in order; may raise DataError.
        check: raises DataError if the content has changed since `identity` was computed.
        note: with data=packages, the packages that differ from the reference versions; else "".
        skipped_empty: number of skipped files that are empty or contain only whitespace.
        skipped_undecodable: number of other skipped files, such as hidden and non-UTF-8 files.
        skipped: skipped files of the directories in data.paths, with reasons.
        parts_for: if the texts depend on the tokenizer, lists the parts for a tokenizer;
            otherwise None.
    """

    description: str
    identity: str
    list_parts: Callable[[], Sequence[Part]]
    check: Callable[[], None] = lambda: None
    note: str = ""
    skipped_empty: int = 0
    skipped_undecodable: int = 0
    skipped: Skipped = field(default_factory=dict)
    former_identities: tuple[str, ...] = ()
    has_prompts: bool = False
    parts_for: Callable[[Tokenizer], Sequence[Part]] | None = None

    @cached_property
    def parts(self) -> Sequence[Part]:
        return self.list_parts()

    def texts(self) -> Iterator[str]:
        for part in self.parts:
            for documents in part.read():
                for text in documents.texts:
                    if text and not text.isspace():
                        yield text


class TextsPart(Part):
    """A part of a corpus whose documents are in memory."""

    def __init__(self, name: str, texts: Sequence[str | None]) -> None:
        size = sum(len(text) for text in texts if text)
        super().__init__(name, size, lambda: iter([TextBatch(list(texts))]))


def kinds_of_rows(rows: Iterable[Any]) -> dict[str, str]:
    """Return the type name of each column in JSON objects, such as {"text": "string", "id": "int"}.

    The first value of a column determines the type. A null value counts as a missing string.
    """
    kinds: dict[str, str] = {}
    for row in rows:
        if not isinstance(row, dict):
            continue
        for name, value in row.items():
            is_string = isinstance(value, str) or value is None
            kinds.setdefault(name, "string" if is_string else type(value).__name__)
    return kinds


def columns_of(cfg: DataConfig) -> list[str]:
    return [cfg.text_column, cfg.prompt_column] if cfg.prompt_column else [cfg.text_column]


def open_corpus(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the corpus that the data config describes, and compute `Corpus.identity`.

    Raises DataError if the source is missing, empty, in an unknown format or not UTF-8.
    """
    corpus: Corpus = SOURCES[cfg.source](cfg, cache_dir)
    if cfg.prompt_column is None:
        return corpus
    # Only here, so that a corpus without prompts keeps the hash that older versions gave it.
    prompts_identity = ("prompts", cfg.prompt_column)
    former_identities: list[str] = []
    for former in corpus.former_identities:
        former_identities.append(combined_hash([former, *prompts_identity]))
    return replace(
        corpus,
        identity=combined_hash([corpus.identity, *prompts_identity]),
        former_identities=tuple(former_identities),
        has_prompts=True,
    )


def check_columns(kinds: dict[str, str], columns: Sequence[str], origin: str) -> None:
    """Raise DataError unless all `columns` exist and contain text.

    `kinds` maps existing columns to type names. `columns` contains the text column and, optionally,
    the prompt column. `origin` names the file or dataset in the error message.
    """
    text_columns = [name for name, kind in kinds.items() if kind in TEXT_TYPES]
    # `columns` is shorter than the keys if the corpus has no prompts.
    for key, column in zip(("text_column", "prompt_column"), columns, strict=False):
        if column in text_columns:
            continue
        settings = [f"data.{key}={name}" for name in text_columns if name not in columns]
        fix = f"use {' or '.join(settings)}" if settings else "none of them contains text"
        raise DataError(
            f"{origin} has no column {column!r} that contains text (columns: "
            f"{', '.join(kinds)}); {fix}"
        )


def reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    if isinstance(cause, UnicodeDecodeError):
        return "not UTF-8 text"
    text = str(cause)
    # Without the number and the file name, which the text of an OSError contains.
    if isinstance(cause, OSError) and cause.strerror:
        text = str(cause.strerror)
    # Messages of libraries can have many lines; the first line names the problem.
    lines = text.strip().splitlines()
    return lines[0] if lines else type(cause).__name__
