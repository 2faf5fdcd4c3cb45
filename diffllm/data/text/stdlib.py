"""The standard library of the Python that runs as a corpus: nothing to download."""

import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from diffllm.core.errors import DataError
from diffllm.core.registry import source
from diffllm.data.config import DataConfig, SampleBy
from diffllm.data.text.corpus import Corpus
from diffllm.data.text.file_index import FileFacts, combined_hash, file_facts
from diffllm.data.text.files import check_all, parts_of


@source("stdlib")
def stdlib(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the .py files of the standard library that are UTF-8; raises DataError."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = python_files(root)
    facts = dict(zip(paths, file_facts(paths, cache_dir), strict=True))
    kept = [path for path in paths if facts[path].is_text]
    if not kept:
        raise DataError(f"{root}: no .py files to use as a corpus")
    identity = combined_hash(["stdlib", *(facts[path].sha256 for path in kept)])
    where = f"standard library of Python {platform.python_version()}"
    return corpus_of(cfg, facts, kept, where, identity)


def corpus_of(
    cfg: DataConfig,
    facts: dict[Path, FileFacts],
    kept: Sequence[Path],
    where: str,
    identity: str,
    note: str = "",
) -> Corpus:
    """Make a corpus of text files, each of which is one document.

    Args:
        facts: those of all files, also of skipped ones.
        kept: the files that are read, in order.
        where: start of the description.
    """
    of_kept = [facts[path] for path in kept]
    whole = replace(cfg, sample_by=SampleBy.document)
    return Corpus(
        description=f"{where}, {len(kept)} files",
        identity=identity,
        list_parts=lambda: parts_of(kept, of_kept, ["text"] * len(kept), whole),
        check=partial(check_all, kept, of_kept),
        note=note,
        skipped_empty=sum(each.is_blank for each in facts.values()),
        skipped_undecodable=sum(not each.is_utf8 for each in facts.values()),
    )


def python_files(root: Path) -> list[Path]:
    """List the .py files under `root`, sorted by relative path, without installed packages."""
    excluded = {"site-packages", "dist-packages", "__pycache__"}
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in excluded]
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
