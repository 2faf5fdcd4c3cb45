"""The standard library of the Python that runs as a corpus: nothing to download."""

import os
import platform
import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path

from diffllm.data.config import DataConfig, SampleBy
from diffllm.data.text.corpus import Corpus
from diffllm.data.text.file_index import combined_hash, file_facts
from diffllm.data.text.files import check_all, parts_of
from diffllm.errors import DataError
from diffllm.registry import source


@source("stdlib")
def stdlib(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the .py files of the standard library that are UTF-8; raises DataError."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = python_files(root)
    facts = file_facts(paths, cache_dir)
    kept = [(p, f) for p, f in zip(paths, facts, strict=True) if f.is_utf8 and not f.is_blank]
    if not kept:
        raise DataError(f"{root}: no .py files to use as a corpus")
    texts, of_texts = [path for path, _ in kept], [f for _, f in kept]
    whole = replace(cfg, sample_by=SampleBy.document)
    return Corpus(
        description=f"standard library of Python {platform.python_version()}, {len(kept)} files",
        identity=combined_hash(["stdlib", *(facts.sha256 for _, facts in kept)]),
        list_parts=lambda: parts_of(texts, of_texts, ["text"] * len(texts), whole),
        check=partial(check_all, texts, of_texts),
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
