"""Datasets of the Hugging Face hub, or of a directory like one, as a corpus.

They stream: nothing but what is being read is on this machine.
"""

import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType

from filelock import FileLock

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
from diffllm.data.text.file_index import combined_hash, file_facts
from diffllm.data.waiting import said_if_long
from diffllm.errors import DataError
from diffllm.files import replace_file
from diffllm.registry import source

MOST_PARTS = 16_384
ANSWERS_WITHIN = 60.0
"""Seconds in which the hub has to say which commit a branch stands for."""


@source("hub")
def hub(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open data.dataset at a commit that is resolved once; raises DataError."""
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
        revision = resolve_revision(cfg.dataset, cfg.revision, cache_dir)
        version = f"{cfg.dataset}@{revision}"
        dataset, label = cfg.dataset, f"{cfg.dataset}@{revision[:12]}"

    what = ["hub", version, cfg.name, cfg.split, cfg.text_column]
    what += [cfg.data_dir] if cfg.data_dir else []
    return Corpus(
        description=", ".join(filter(None, [label, cfg.name, cfg.data_dir, cfg.split])),
        identity=combined_hash(what),
        list_parts=lambda: files_of(cfg, dataset, revision, cache_dir),
    )


def files_of(cfg: DataConfig, dataset: str, revision: str | None, cache_dir: Path) -> list[Part]:
    """Make a part of each of the dataset's files, or of some where there are very many; raises
    DataError."""
    where = f"data.dataset={cfg.dataset}"
    options = {"name": cfg.name, "split": cfg.split, "revision": revision}
    options |= {"data_dir": cfg.data_dir} if cfg.data_dir else {}
    columns = columns_of(cfg)
    try:
        with said_if_long(f"the hub's list of files of {cfg.dataset}"):
            # A slice of a split cannot be streamed: it is copied into the cache.
            rows = library().load_dataset(
                dataset,
                streaming="[" not in cfg.split,
                cache_dir=str(cache_dir / "datasets"),
                **options,
            )
            kinds = kinds_of(rows)
    except Exception as error:
        raise DataError(f"{where}: {reason(error)}") from error
    check_columns(kinds, columns, where)
    if "[" in cfg.split:
        return rows_of(rows, cfg, where)
    rows = rows.select_columns(columns)
    number = min(rows.num_shards, MOST_PARTS)
    return [
        RowsPart(
            rows.shard(num_shards=number, index=i),
            tuple(columns),
            f"{where}, file {i + 1} of {number}",
            0,
        )
        for i in range(number)
    ]


def resolve_revision(dataset: str, revision: str | None, cache_dir: Path) -> str:
    """Return the commit that a branch or tag stood for when this cache first used it.

    Asked once: every process and every later run then reads the same corpus, offline too.
    """
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    stored = cache_dir / "revisions" / f"{combined_hash([dataset, revision])[:32]}.json"
    if not stored.exists():
        from huggingface_hub import HfApi

        try:
            with said_if_long(f"the hub's commit of {dataset}"):
                info = HfApi().dataset_info(dataset, revision=revision, timeout=ANSWERS_WITHIN)
        except Exception as error:
            silent = "Connect" in type(error).__name__ or "Timeout" in type(error).__name__
            what = "the hub does not answer: " if silent else ""
            raise DataError(f"data.dataset={dataset}: {what}{reason(error)}") from error
        stored.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{stored}.lock"):
            if not stored.exists():  # the first process to resolve wins
                found = {"dataset": dataset, "revision": revision, "sha": info.sha}
                replace_file(stored, json.dumps(found))
    sha: str = json.loads(stored.read_text())["sha"]
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
