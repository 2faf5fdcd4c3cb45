"""The sources of documents: each becomes a `datasets.Dataset` with one column, "text"."""

import errno
import glob
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from diffllm.data.config import DataConfig
from diffllm.data.file_index import FileFacts, combined_hash, file_facts
from diffllm.errors import DataError
from diffllm.files import replace_file
from diffllm.registry import SOURCES, source

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
COMPRESSED = (".gz", ".zst")
TEXT_TYPES = ("string", "large_string")
USUAL_COLUMNS = ("text", "content", "contents", "body", "document", "raw_content")
"""Names that columns of text have in most datasets, in lower case."""
CACHE_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


@dataclass(frozen=True)
class Corpus:
    """A corpus whose content is identified now and loaded only when something has to read it."""

    description: str
    identity: str
    """Hash of the content and of the settings that decide how documents are cut from it."""
    load: Callable[[], "Dataset"]
    """Loads the documents, empty ones included; raises DataError."""
    skipped_empty: int = 0
    """Number of files left out because they hold nothing but whitespace."""
    skipped_undecodable: int = 0
    """Number of files left out because they are not UTF-8."""


def open_corpus(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the corpus that `cfg` names, and identify its content.

    DataError is raised for a source that is missing, empty, of an unknown format or not UTF-8.
    """
    return SOURCES[cfg.source](cfg, cache_dir)


@source("stdlib")
def _stdlib(cfg: DataConfig, cache_dir: Path) -> Corpus:
    paths = python_files(Path(sysconfig.get_path("stdlib")))
    facts = file_facts(paths, cache_dir)
    kept = [(p, f) for p, f in zip(paths, facts, strict=True) if f.is_utf8 and not f.is_blank]
    if not kept:
        raise DataError(f"{sysconfig.get_path('stdlib')}: no .py files to use as a corpus")

    def load() -> "Dataset":
        # Document by document in one call: a call a file would take ten times as long.
        return _load_files("text", [path for path, _ in kept], cache_dir, sample_by="document")

    return Corpus(
        description=f"standard library of Python {platform.python_version()}, {len(kept)} files",
        identity=combined_hash(["stdlib", *(facts.sha256 for _, facts in kept)]),
        load=cache(load),
        skipped_empty=sum(f.is_blank for f in facts),
        skipped_undecodable=sum(not f.is_utf8 for f in facts),
    )


def python_files(root: Path) -> list[Path]:
    """List the .py files under `root`, sorted by relative path, without installed packages."""
    excluded = {"site-packages", "dist-packages", "__pycache__"}
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in excluded]
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


@source("files")
def _files(cfg: DataConfig, cache_dir: Path) -> Corpus:
    paths = list(dict.fromkeys(path for pattern in cfg.paths for path in expand(pattern)))
    formats = [_format(path) for path in paths]
    facts = file_facts(paths, cache_dir)
    for path, facts_of_file in zip(paths, facts, strict=True):
        _check_readable(path, facts_of_file)

    def load() -> "Dataset":
        # File by file: columns and types other than the text may differ between files, and an
        # error can name its file.
        parts = [_load_file(path, cfg, cache_dir, len(paths) > 1) for path in paths]
        if len({part.features["text"].dtype for part in parts}) > 1:
            large = _datasets().Value("large_string")
            parts = [part.cast_column("text", large) for part in parts]
        return _datasets().concatenate_datasets(parts)

    contents = [[facts.sha256, form] for facts, form in zip(facts, formats, strict=True)]
    names = ", ".join(path.name for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
    return Corpus(
        description=f"{len(paths)} file{'s'[: len(paths) > 1]}: {names}",
        identity=combined_hash(["files", cfg.text_column, cfg.sample_by.value, contents]),
        load=cache(load),
    )


def expand(pattern: str) -> list[Path]:
    """Return the file of that name, or the files that a glob finds, sorted."""
    path = Path(pattern).expanduser().absolute()
    if path.is_file():
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    files = [path for path in found if path.is_file()]
    if not files:
        what = "is a directory; name its files, for example with *.parquet" * path.is_dir()
        raise DataError(f"data.paths: {pattern} {what or 'matches no file'}")
    return files


def _format(path: Path) -> str:
    stem, suffix = os.path.splitext(path.name.lower())
    compressed = suffix in COMPRESSED
    if compressed:
        suffix = os.path.splitext(stem)[1]
    if suffix not in FORMATS or (compressed and suffix == ".parquet"):
        raise DataError(
            f"{path}: unsupported format; use .parquet, or .jsonl, .json, .txt and these with "
            ".gz or .zst"
        )
    return FORMATS[suffix]


def _check_readable(path: Path, facts: FileFacts) -> None:
    if facts.is_blank:
        raise DataError(f"{path}: the file is empty")
    if path.suffix.lower() in (".jsonl", ".json", ".txt") and not facts.is_utf8:
        raise DataError(f"{path}: not UTF-8 text")


def _load_file(path: Path, cfg: DataConfig, cache_dir: Path, several: bool) -> "Dataset":
    where = str(path)
    form, column = _format(path), cfg.text_column
    options: dict[str, Any] = {}
    if form == "text":
        column, options = "text", {"sample_by": cfg.sample_by.value}
    if form == "parquet":
        # The other columns would be copied into the cache for nothing.
        import pyarrow.parquet

        try:
            columns = pyarrow.parquet.read_schema(path)
        except Exception as error:
            raise DataError(f"{path}: {_reason(error)}") from error
        _check_column({field.name: str(field.type) for field in columns}, column, where, several)
        options = {"columns": [column]}
    return _text_column(_load_files(form, [path], cache_dir, **options), column, where, several)


@source("hub")
def _hub(cfg: DataConfig, cache_dir: Path) -> Corpus:
    assert cfg.dataset is not None
    directory = Path(cfg.dataset).expanduser().absolute()
    if directory.is_file():
        raise DataError(f"data.dataset={cfg.dataset} is a file; name its directory, or data=files")
    if directory.is_dir():
        script = directory / f"{directory.name}.py"
        if script.exists():
            raise DataError(f"{script}: a dataset's own code is not run; use its data files")
        paths = sorted(path.absolute() for path in directory.rglob("[!.]*") if path.is_file())
        version = combined_hash([facts.sha256 for facts in file_facts(paths, cache_dir)])
        dataset, revision, label = str(directory), None, directory.name
    else:
        revision = _resolve_revision(cfg.dataset, cfg.revision, cache_dir)
        version = f"{cfg.dataset}@{revision}"
        dataset, label = cfg.dataset, f"{cfg.dataset}@{revision[:12]}"

    def load() -> "Dataset":
        where = f"data.dataset={cfg.dataset}"
        options = {"name": cfg.name, "split": cfg.split, "revision": revision}
        options |= {"data_dir": cfg.data_dir} if cfg.data_dir else {}
        loaded = _load(where, dataset, cache_dir, **options)
        return _text_column(loaded, cfg.text_column, where)

    return Corpus(
        description=", ".join(filter(None, [label, cfg.name, cfg.data_dir, cfg.split])),
        identity=combined_hash(
            ["hub", version, cfg.name, cfg.split, cfg.text_column]
            + [cfg.data_dir] * bool(cfg.data_dir)
        ),
        load=cache(load),
    )


def _resolve_revision(dataset: str, revision: str | None, cache_dir: Path) -> str:
    """Return the commit that a branch or tag stood for when this cache first used it.

    Asked once: every process and every later run then reads the same corpus, offline too.
    """
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    stored = cache_dir / "revisions" / f"{combined_hash([dataset, revision])[:32]}.json"
    if not stored.exists():
        from huggingface_hub import HfApi

        try:
            commit = HfApi().dataset_info(dataset, revision=revision).sha
        except Exception as error:
            silent = "Connect" in type(error).__name__ or isinstance(error, TimeoutError)
            what = "the hub does not answer: " if silent else ""
            raise DataError(f"data.dataset={dataset}: {what}{_reason(error)}") from error
        stored.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{stored}.lock"):
            if not stored.exists():  # the first process to resolve wins
                found = {"dataset": dataset, "revision": revision, "sha": commit}
                replace_file(stored, json.dumps(found))
    return json.loads(stored.read_text())["sha"]


@cache
def _datasets() -> ModuleType:
    """Import the `datasets` module when documents are read, with its own output off."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    # Local files are nobody's download, and the counter wants the network.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # Releases that still run a dataset's own code would ask this, or the user.
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    return datasets


def _load_files(form: str, paths: list[Path], cache_dir: Path, **options: Any) -> "Dataset":
    where = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files from {paths[0]} on"
    files = [glob.escape(str(path)) for path in paths]
    return _load(where, form, cache_dir, data_files=files, split="train", **options)


def _load(where: str, source: str, cache_dir: Path, **options: Any) -> "Dataset":
    """Load by `datasets`; whatever goes wrong inside becomes one line that names `where`."""
    try:
        return _datasets().load_dataset(source, cache_dir=str(cache_dir / "datasets"), **options)
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno in CACHE_DISK_ERRORS:
            raise cause from None
        raise DataError(f"{where}: {_reason(cause)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _text_column(dataset: "Dataset", column: str, where: str, several: bool = False) -> "Dataset":
    """Return `dataset` with the column `column` alone, named "text"."""
    types = {name: str(getattr(kind, "dtype", kind)) for name, kind in dataset.features.items()}
    _check_column(types, column, where, several)
    text = dataset.select_columns([column])
    return text if column == "text" else text.rename_column(column, "text")


def _check_column(types: dict[str, str], column: str, where: str, several: bool = False) -> None:
    """Raise DataError unless the column is there and holds text.

    Args:
        types: of the columns.
        several: whether other files need the same column.
    """
    if types.get(column) in TEXT_TYPES:
        return
    texts = [name for name, kind in types.items() if kind in TEXT_TYPES]
    usual = [name for name in texts if name.lower() in USUAL_COLUMNS]
    plausible = usual if len(usual) == 1 else texts
    hint = " or ".join(f"data.text_column={name}" for name in plausible)
    if column in types:
        problem = f"column {column!r} holds {types[column]}, not text"
    else:
        problem = f"no column {column!r}; it has {', '.join(types)}"
    advice = f": use {hint}" if hint else ", none of them text"
    others = ", which all of the files need to have" if several and hint else ""
    raise DataError(f"{where}: {problem}{advice}{others}")
