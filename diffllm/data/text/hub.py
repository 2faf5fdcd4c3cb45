"""Datasets of the Hugging Face hub, or of a directory like one, as a corpus.

They are streamed: only the documents that are being read are on this machine.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import ModuleType

from diffllm.core.errors import DataError, printable
from diffllm.core.files import locked, read_json, replace_file
from diffllm.core.printing import to_stderr
from diffllm.core.registry import source
from diffllm.data.config import DataConfig
from diffllm.data.text.corpus import (
    Corpus,
    Part,
    RowsPart,
    check_columns,
    columns_of,
    kinds_of,
    reason,
    rows_of,
)
from diffllm.data.text.file_index import (
    COMPRESSIONS,
    FORMATS,
    combined_hash,
    file_facts,
    names_of,
)
from diffllm.data.text.files import check_all, check_file, reading
from diffllm.data.verified import usable

MOST_PARTS = 16_384
COMMIT = r"[0-9a-f]{40}"
ANSWERS_WITHIN = 60.0
"""Seconds in which the hub must answer which commit a branch stands for."""


@source("hub")
def hub(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open data.dataset at a commit that is resolved once; raises DataError."""
    assert cfg.dataset is not None
    directory = Path(cfg.dataset).expanduser().absolute()
    paths: list[Path] = []
    check: Callable[[], None] = lambda: None  # noqa: E731
    if directory.is_file():
        raise DataError(f"data.dataset={cfg.dataset} is a file; name its directory, or data=files")
    if directory.is_dir():
        script = directory / f"{directory.name}.py"
        if script.exists():
            raise DataError(f"{script}: a dataset's own code is not run; use its data files")
        paths = sorted(p.absolute() for p in directory.rglob("[!.]*") if not p.is_dir())
        for path in paths:
            check_file(path)
        facts = file_facts(paths, cache_dir)
        version = combined_hash([of_file.sha256 for of_file in facts])
        check = partial(check_all, paths, facts)
        dataset, revision, label = str(directory), None, printable(directory.name)
    elif not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", cfg.dataset):
        raise DataError(
            f"data.dataset={cfg.dataset}: no such directory, and no name of a dataset of the hub, "
            "which is owner/name"
        )
    else:
        revision = resolve_revision(cfg.dataset, cfg.revision, cache_dir)
        version = f"{cfg.dataset}@{revision}"
        dataset, label = cfg.dataset, f"{cfg.dataset}@{revision[:12]}"

    # The library knows its copies by name and time, so each content has a place of its own.
    copies = cache_dir / "datasets" / (combined_hash([version])[:32] if paths else "")
    what = ["hub", version, cfg.name, cfg.split, cfg.text_column]
    what += [cfg.data_dir] if cfg.data_dir else []
    return Corpus(
        description=", ".join(filter(None, [label, cfg.name, cfg.data_dir, cfg.split])),
        identity=combined_hash(what),
        list_parts=lambda: files_of(cfg, dataset, revision, copies, paths, check),
        check=check,
    )


def files_of(
    cfg: DataConfig,
    dataset: str,
    revision: str | None,
    copies: Path,
    paths: Sequence[Path],
    check: Callable[[], None],
) -> list[Part]:
    """Make a part of each of the dataset's files, or of several if there are very many; raises
    DataError.

    Args:
        copies: directory of what the library copies.
        paths: the files of a directory on this machine.
        check: raises DataError if these have changed.
    """
    where = f"data.dataset={cfg.dataset}"
    options = {"name": cfg.name, "revision": revision}
    options |= {"data_dir": cfg.data_dir} if cfg.data_dir else {}
    columns = columns_of(cfg)
    for path in paths:
        check_whole(path)
    if not paths:
        to_stderr(f"waiting for the hub's list of files of {cfg.dataset}")
    # A slice of a split cannot be streamed: it is copied into the cache.
    streaming = "[" not in cfg.split
    try:
        rows = library().load_dataset(
            dataset, streaming=streaming, cache_dir=str(copies), split=cfg.split, **options
        )
        kinds = kinds_of(rows)
    except Exception as error:
        raise DataError(f"{where}: {reason(error)}") from error
    by_split: dict[str, list[str]] = {}
    if paths:
        found = library().load_dataset_builder(dataset, **options).config.data_files or {}
        by_split = {split: list(map(str, files)) for split, files in found.items()}
        read = set(chain.from_iterable(by_split.values()))
        left = [p for p in paths if str(p) not in read and FORMATS.keys() & {*p.suffixes}]
        if left and not cfg.name and not cfg.data_dir:  # the library reads one format
            to_stderr(f"{where}: these files are not read: {names_of(left)}; data.paths reads them")
    check_columns(kinds, columns, where)
    if not streaming:
        check()
        return rows_of(rows, cfg, where)
    rows = rows.select_columns(columns)
    number = min(rows.num_shards, MOST_PARTS)
    names = by_split.get(cfg.split, [])
    if len(names) != number:
        names = [f"{where}, file {i + 1} of {number}" for i in range(number)]
    shards = [rows.shard(num_shards=number, index=i) for i in range(number)]
    return [
        RowsPart(shard, tuple(columns), name, 0, check)
        for shard, name in zip(shards, names, strict=True)
    ]


def check_whole(path: Path) -> None:
    """Raise DataError for a truncated compressed file: the library takes it for a shorter one."""
    if path.suffix.lower() in COMPRESSIONS:
        from diffllm.data.text.readers import BLOCK_BYTES, opened

        with reading(path), opened(path) as file:
            while file.read(BLOCK_BYTES):
                pass


def resolve_revision(dataset: str, revision: str | None, cache_dir: Path) -> str:
    """Return the commit that a branch or tag stood for when this cache first used it.

    Asked once: every process and every later run then reads the same corpus, also offline.
    """
    if revision and re.fullmatch(COMMIT, revision):
        return revision
    stored = cache_dir / "revisions" / f"{combined_hash([dataset, revision])[:32]}.json"
    if not stored.exists():
        from huggingface_hub import HfApi

        to_stderr(f"waiting for the hub's commit of {dataset}")
        try:
            info = HfApi().dataset_info(dataset, revision=revision, timeout=ANSWERS_WITHIN)
        except Exception as error:
            silent = "Connect" in type(error).__name__ or "Timeout" in type(error).__name__
            what = "the hub does not answer: " if silent else ""
            raise DataError(f"data.dataset={dataset}: {what}{reason(error)}") from error
        stored.parent.mkdir(parents=True, exist_ok=True)
        with locked(Path(f"{stored}.lock")):
            if not stored.exists():  # the first process to resolve wins
                found = {"dataset": dataset, "revision": revision, "sha": info.sha}
                replace_file(stored, json.dumps(found))
    with usable(stored, stored):
        sha = str(read_json(stored, follow=True).get("sha"))
        if not re.fullmatch(COMMIT, sha):
            raise ValueError(f"sha={sha} must be the hash of a commit")
        return sha


@cache
def library() -> ModuleType:
    """Import the `datasets` module when documents are read, with its own output off."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    # Local files are nobody's download, and the counter wants the network.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # Releases that still run a dataset's own code would ask this, or the user.
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    return datasets
