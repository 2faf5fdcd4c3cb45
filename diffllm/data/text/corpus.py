"""A corpus: documents in parts, each of which can be read on its own."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from diffllm.core.errors import DataError
from diffllm.core.registry import SOURCES
from diffllm.data.config import DataConfig
from diffllm.data.text.file_index import combined_hash

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

ROWS = 256
TEXT_TYPES = ("string", "large_string", "string_view")


class TextBatch(NamedTuple):
    """Some documents, in order, empty ones included."""

    texts: list[str | None]
    prompts: Sequence[str | Sequence[str] | None] | None = None
    """The context before each text, or several pieces, alternately context and to be predicted, the
    last one context."""

    @property
    def before(self) -> list[tuple[str, ...]]:
        if self.prompts is None:
            return [()] * len(self.texts)
        return [
            ((prompt,) if prompt else ()) if isinstance(prompt, str) else tuple(prompt or ())
            for prompt in self.prompts
        ]


class Part(Protocol):
    """A stretch of a corpus that one process reads; it depends on the corpus alone."""

    @property
    def name(self) -> str:
        """Its place, for messages."""

    @property
    def size(self) -> int:
        """About how many bytes of text it has; 0 if unknown."""

    def read(self) -> Iterator[TextBatch]:
        """Yield its documents in order, some at a time; raises DataError."""


@dataclass(frozen=True)
class Corpus:
    """A corpus whose content is identified now and read only when needed."""

    description: str
    identity: str
    """Hash of the content and of the settings that cut it into documents."""
    list_parts: Callable[[], Sequence[Part]]
    """Lists the parts, in order; raises DataError."""
    check: Callable[[], None] = lambda: None
    """Raises DataError if the content no longer has the identity."""
    note: str = ""
    """Differences from a known reference; empty if none."""
    skipped_empty: int = 0
    skipped_undecodable: int = 0
    """Skipped files: only whitespace, or not UTF-8."""
    has_prompts: bool = False

    @cached_property
    def parts(self) -> Sequence[Part]:
        return self.list_parts()

    def texts(self) -> Iterator[str]:
        """Yield the texts that are not blank, in order."""
        for part in self.parts:
            for documents in part.read():
                yield from (text for text in documents.texts if text and not text.isspace())


@dataclass(frozen=True)
class TextsPart:
    name: str
    texts: Sequence[str | None]

    @property
    def size(self) -> int:
        return sum(len(text) for text in self.texts if text)

    def read(self) -> Iterator[TextBatch]:
        yield TextBatch(list(self.texts))


@dataclass(frozen=True)
class RowsPart:
    """Columns of a dataset of the `datasets` library."""

    rows: "Dataset | IterableDataset"
    columns: tuple[str, ...]
    name: str
    size: int

    def read(self) -> Iterator[TextBatch]:
        try:
            for table in self.rows.with_format("arrow").iter(ROWS):
                yield TextBatch(*(table.column(name).to_pylist() for name in self.columns))
        except Exception as error:
            raise DataError(f"{self.name}: {reason(error)}") from error


def rows_of(dataset: "Dataset", cfg: DataConfig, name: str) -> list[Part]:
    columns = columns_of(cfg)
    check_columns(kinds_of(dataset), columns, name)
    size = int(dataset.data.nbytes)
    return [RowsPart(dataset.select_columns(columns), tuple(columns), name, size)]


def kinds_of(dataset: "Dataset | IterableDataset") -> dict[str, str]:
    if dataset.features:
        return {name: str(getattr(k, "dtype", k)) for name, k in dataset.features.items()}
    return kinds_of_rows(islice(dataset, 1))


def kinds_of_rows(rows: Iterable[Any]) -> dict[str, str]:
    """Return the column types of JSON objects by name; null counts as text."""
    kinds: dict[str, str] = {}
    for row in rows:
        for name, value in row.items() if isinstance(row, dict) else ():
            known = isinstance(value, str) or value is None
            kinds.setdefault(name, "string" if known else type(value).__name__)
    return kinds


def columns_of(cfg: DataConfig) -> list[str]:
    return [cfg.text_column, *([cfg.prompt_column] if cfg.prompt_column else [])]


def open_corpus(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the corpus that `cfg` names, and identify its content.

    Raises DataError for a source that is missing, empty, of an unknown format or not UTF-8.
    """
    corpus: Corpus = SOURCES[cfg.source](cfg, cache_dir)
    if cfg.prompt_column is None:
        return corpus
    identity = combined_hash([corpus.identity, "prompts", cfg.prompt_column])
    return replace(corpus, identity=identity, has_prompts=True)


def check_columns(kinds: dict[str, str], columns: Sequence[str], where: str) -> None:
    """Raise DataError unless `columns`, the text column first, exist in `kinds` and contain
    text."""
    texts = [name for name, kind in kinds.items() if kind in TEXT_TYPES]
    for key, column in zip(("text_column", "prompt_column"), columns, strict=False):
        if column not in texts:
            hint = " or ".join(f"data.{key}={name}" for name in texts if name not in columns)
            problem = f"no column {column!r} of text; it has {', '.join(kinds)}"
            end = f": use {hint}" if hint else ", none of them text"
            raise DataError(f"{where}: {problem}{end}")


def reason(error: BaseException) -> str:
    """Return one line that says why reading failed."""
    cause: Any = error.__cause__ or error
    if isinstance(cause, UnicodeDecodeError):
        return "not UTF-8 text"
    lines = str(cause.strerror if isinstance(cause, OSError) and cause.strerror else cause)
    return next(iter(lines.strip().splitlines()), type(cause).__name__)
