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
"""Documents that are read at a time."""
TEXT_TYPES = ("string", "large_string", "string_view")


class TextBatch(NamedTuple):
    """Some documents, in order, empty ones included."""

    texts: list[str | None]
    prompts: Sequence[str | Sequence[str] | None] | None = None
    """The prompt before each text, which is only context; or several pieces, in turn only context
    and to be predicted, the last one context again. None if there are no prompts."""

    @property
    def before(self) -> list[tuple[str, ...]]:
        """The pieces before each text: none, a prompt, or several."""
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
    """Hash of the content and of the settings that decide how documents are cut from it."""
    list_parts: Callable[[], Sequence[Part]]
    """Lists the parts, in order; raises DataError."""
    check: Callable[[], None] = lambda: None
    """Raises DataError if the content no longer has the identity."""
    note: str = ""
    """How the content differs from a known reference; empty if it does not."""
    skipped_empty: int = 0
    """Number of skipped files that contain nothing but whitespace."""
    skipped_undecodable: int = 0
    """Number of skipped files that are not UTF-8."""
    has_prompts: bool = False
    """Whether its documents begin with text that is only context."""

    @cached_property
    def parts(self) -> Sequence[Part]:
        return self.list_parts()

    def texts(self) -> Iterator[str]:
        """Yield the texts of the documents that are more than whitespace, in order."""
        for part in self.parts:
            for documents in part.read():
                yield from (text for text in documents.texts if text and not text.isspace())


@dataclass(frozen=True)
class TextsPart:
    """Documents that are in memory."""

    name: str
    texts: Sequence[str | None]

    @property
    def size(self) -> int:
        return sum(len(text) for text in self.texts if text)

    def read(self) -> Iterator[TextBatch]:
        yield TextBatch(list(self.texts))


@dataclass(frozen=True)
class RowsPart:
    """The rows of a dataset of the `datasets` library, with the columns that are read."""

    rows: "Dataset | IterableDataset"
    columns: tuple[str, ...]
    name: str
    size: int

    def read(self) -> Iterator[TextBatch]:
        """Yield the rows, some at a time; raises DataError if the library cannot read them."""
        try:
            for table in self.rows.with_format("arrow").iter(ROWS):
                yield TextBatch(*(table.column(name).to_pylist() for name in self.columns))
        except Exception as error:
            raise DataError(f"{self.name}: {reason(error)}") from error


def rows_of(dataset: "Dataset", cfg: DataConfig, name: str) -> list[Part]:
    """Make one part of a `datasets.Dataset`; raises DataError if a column is no text."""
    columns = columns_of(cfg)
    check_columns(kinds_of(dataset), columns, name)
    size = int(dataset.data.nbytes)
    return [RowsPart(dataset.select_columns(columns), tuple(columns), name, size)]


def kinds_of(dataset: "Dataset | IterableDataset") -> dict[str, str]:
    """Return the types of a dataset's columns by name, those of its first row if it has none."""
    if dataset.features:
        return {name: str(getattr(k, "dtype", k)) for name, k in dataset.features.items()}
    return kinds_of_rows(islice(dataset, 1))


def kinds_of_rows(rows: Iterable[Any]) -> dict[str, str]:
    """Return the types of the columns of JSON objects by name; text if it may be text."""
    kinds: dict[str, str] = {}
    for row in rows:
        for name, value in row.items() if isinstance(row, dict) else ():
            known = isinstance(value, str) or value is None
            kinds.setdefault(name, "string" if known else type(value).__name__)
    return kinds


def columns_of(cfg: DataConfig) -> list[str]:
    """List the columns that are read, in the order of `TextBatch`."""
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
    """Raise DataError unless the columns exist and contain text.

    Args:
        kinds: the types of all columns.
        columns: the columns that are read, that of the text first.
    """
    texts = [name for name, kind in kinds.items() if kind in TEXT_TYPES]
    for key, column in zip(("text_column", "prompt_column"), columns, strict=False):
        if column not in texts:
            hint = " or ".join(f"data.{key}={name}" for name in texts if name not in columns)
            problem = f"no column {column!r} of text; it has {', '.join(kinds)}"
            end = f": use {hint}" if hint else ", none of them text"
            raise DataError(f"{where}: {problem}{end}")


def reason(error: BaseException) -> str:
    """Return the one line that says why reading failed."""
    cause: Any = error.__cause__ or error
    if isinstance(cause, UnicodeDecodeError):
        return "not UTF-8 text"
    lines = str(cause.strerror if isinstance(cause, OSError) and cause.strerror else cause)
    return next(iter(lines.strip().splitlines()), type(cause).__name__)
