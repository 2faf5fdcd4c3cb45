"""Use a dataset of the Hugging Face hub as a corpus; documents are streamed one by one."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from diffllm.core.errors import DataError
from diffllm.core.files import locked, read_json, replace_file
from diffllm.core.printing import to_stderr
from diffllm.core.registry import source
from diffllm.data.config import DataConfig
from diffllm.data.text.corpus import (
    ROWS,
    Corpus,
    Part,
    TextBatch,
    check_columns,
    columns_of,
    kinds_of_rows,
)
from diffllm.data.text.file_index import combined_hash
from diffllm.data.text.files import naming
from diffllm.data.verified import usable

if TYPE_CHECKING:
    from datasets import IterableDataset

MOST_PARTS = 16_384
COMMIT = r"[0-9a-f]{40}"
ANSWERS_WITHIN = 60.0


@source("hub")
def hub(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the Hugging Face dataset `cfg.dataset` as a corpus, at a fixed commit.

    The commit is stored in `cache_dir` when the dataset is first opened. Raises DataError for an
    invalid dataset name, or if the hub does not return the commit.
    """
    dataset = str(cfg.dataset)
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", dataset) or Path(dataset).exists():
        raise DataError(
            f"data.dataset={dataset} must be the name of a hub dataset, as owner/name; "
            "data.paths reads local files"
        )
    revision = resolve_revision(dataset, cfg.revision, cache_dir)
    settings = ["hub", f"{dataset}@{revision}", cfg.name, cfg.split, cfg.text_column]
    # Only if set, so that hashes of versions without data.data_dir stay valid.
    if cfg.data_dir:
        settings.append(cfg.data_dir)
    label = f"{dataset}@{revision[:12]}"
    names = [name for name in (label, cfg.name, cfg.data_dir, cfg.split) if name]
    return Corpus(
        description=", ".join(names),
        identity=combined_hash(settings),
        list_parts=lambda: files_of(cfg, revision, cache_dir / "datasets"),
    )


def files_of(cfg: DataConfig, revision: str, cache_dir: Path) -> list[Part]:
    """Divide a hub dataset into the parts of a corpus.

    Each part is one file of the dataset, or several files if the dataset has more than 16,384
    files. `cache_dir` is the cache of the `datasets` library, unless HF_HOME or HF_DATASETS_CACHE
    chooses the cache. Raises DataError if the dataset cannot be read, or if the column
    `cfg.text_column` is missing.
    """
    label = f"data.dataset={cfg.dataset}"
    columns = columns_of(cfg)
    options = {"name": cfg.name, "revision": revision, "split": cfg.split, "data_dir": cfg.data_dir}
    to_stderr(f"waiting for the hub's list of files of {cfg.dataset}")
    # A slice of a split cannot be streamed; the library copies the slice into the cache.
    streaming = "[" not in cfg.split
    chosen = os.environ.get("HF_DATASETS_CACHE") or os.environ.get("HF_HOME")
    cache = None if chosen else str(cache_dir)
    with naming(label):
        rows = library().load_dataset(cfg.dataset, streaming=streaming, cache_dir=cache, **options)
        if rows.features:
            kinds: dict[str, str] = {}
            for name, feature in rows.features.items():
                # Nested features, such as lists, have no dtype.
                kinds[name] = str(getattr(feature, "dtype", feature))
        else:
            # A streamed dataset may have no types, so they are those of its first row.
            kinds = kinds_of_rows(islice(rows, 1))
    check_columns(kinds, columns, label)
    if not streaming:
        rows = rows.to_iterable_dataset()
    rows = rows.select_columns(columns)
    count = min(rows.num_shards, MOST_PARTS)
    parts: list[Part] = []
    for i in range(count):
        name = f"{label}, file {i + 1} of {count}"
        shard = rows.shard(num_shards=count, index=i)
        read = partial(read_rows, shard, columns, name)
        # The size is unknown before a file is downloaded.
        parts.append(Part(name, 0, read))
    return parts


def read_rows(rows: "IterableDataset", columns: Sequence[str], name: str) -> Iterator[TextBatch]:
    with naming(name):
        for table in rows.with_format("arrow").iter(ROWS):
            yield TextBatch(*(table.column(column).to_pylist() for column in columns))


def resolve_revision(dataset: str, revision: str | None, cache_dir: Path) -> str:
    """Return the commit hash of the branch or tag `revision` of a hub dataset.

    If `revision` is None, use the default branch. The first call stores the commit hash in
    `cache_dir`, so that later runs read the same documents, even offline.
    """
    if revision and re.fullmatch(COMMIT, revision):
        return revision
    stored = cache_dir / "revisions" / f"{combined_hash([dataset, revision])[:32]}.json"
    if not stored.exists():
        from huggingface_hub import HfApi

        to_stderr(f"waiting for the hub's commit of {dataset}")
        with naming(f"data.dataset={dataset}"):
            info = HfApi().dataset_info(dataset, revision=revision, timeout=ANSWERS_WITHIN)
        stored.parent.mkdir(parents=True, exist_ok=True)
        with locked(Path(f"{stored}.lock")):
            # The first process decides, so that all processes read the same commit.
            if not stored.exists():
                commit = {"dataset": dataset, "revision": revision, "sha": info.sha}
                replace_file(stored, json.dumps(commit))
    with usable(stored, stored):
        sha = str(read_json(stored, follow=True).get("sha"))
        if not re.fullmatch(COMMIT, sha):
            raise ValueError(f"sha={sha} must be the hash of a commit")
        return sha


@cache
def library() -> ModuleType:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    # The counter of downloads would need the network even for local files.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # Refuse code of datasets: older releases read this setting, or would ask the user.
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    return datasets
