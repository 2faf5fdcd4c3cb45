"""Corpora of Python code: installed packages (data=packages), standard library (data=stdlib)."""

import importlib.metadata
import importlib.util
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from diffllm.core.errors import DataError
from diffllm.core.registry import source
from diffllm.data.config import DataConfig, SampleBy
from diffllm.data.text.corpus import Corpus
from diffllm.data.text.file_index import FileFacts, combined_hash, file_facts
from diffllm.data.text.files import check_all, parts_of

REFERENCE_PACKAGES = {
    "matplotlib": ("3.11.2", "cad39bc71dfe10a5c3e9550ba1df5fc9cd251d4198e395c5246702678e8e099c"),
    "networkx": ("3.6.1", "d90ac404778b6b3cf9e89b5b6d40dee6be2bf5a46048bb46655644079d33071a"),
    "numpy": ("2.4.6", "411d9a04e7518665ea992af9ea52b935947ff22f0b349c475b4d7c866ed8df32"),
    "pandas": ("3.1.1", "e2362b554ef760ad949d6e68bdcabeee3a05be1a82aef8ef8943fbacda8319fc"),
    "scipy": ("1.17.1", "f00b62b844b5ca5f5aa4be2a1c20f999c8e0b7f5d3ab6452a2a03811f016d527"),
    "sympy": ("1.14.0", "9f54be8db41058e181a3eef835da3e1c2db4ef184f8f2c0e77c79491b92b55de"),
}
"""Version and hash over all texts of each package, in corpus order, as in constraints.txt. torch is
excluded, because its versions vary most between machines."""
REFERENCE_SHA256 = "1222415951b03a9bb3e5c9a67672e14b6ac6e8092f1ab990d6e5da60c1214b1d"
"""Hash over all texts of the reference corpus, in corpus order."""

GENERATED = {"__config__.py", "version.py", "_version.py", "_version_meson.py"}
ONLY_SOME_BUILDS = ("numpy/distutils/",)


@source("packages")
def packages(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Make a corpus from the .py files of the packages in REFERENCE_PACKAGES.

    REFERENCE_PACKAGES contains a version and a hash for each package. Skip generated files, blank
    files and duplicates. `Corpus.note` lists the packages that differ. Raises DataError if none of
    the packages is installed.
    """
    files_by_package = {name: package_files(name) for name in REFERENCE_PACKAGES}
    paths = list(chain.from_iterable(files_by_package.values()))
    facts, text_paths = with_text(paths, cache_dir)
    # Of several files with the same text, only the first is read.
    path_by_text: dict[str, Path] = {}
    for path in text_paths:
        path_by_text.setdefault(facts[path].sha256, path)
    if not path_by_text:
        names = ", ".join(REFERENCE_PACKAGES)
        raise DataError(
            f"data=packages reads installed packages, but none of {names} is installed; "
            "install one of these packages or use data=stdlib"
        )
    hashes: dict[str, str] = {}
    for name, files in files_by_package.items():
        hashes[name] = texts_hash([facts[path] for path in files])
    distinct_paths = list(path_by_text.values())
    identity = texts_hash([facts[path] for path in distinct_paths])
    note = "" if identity == REFERENCE_SHA256 else difference(hashes)
    corpus = corpus_of(
        cfg, facts, distinct_paths, f"source of {', '.join(REFERENCE_PACKAGES)}", identity
    )
    return replace(corpus, note=note)


@source("stdlib")
def stdlib(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the .py files of the Python standard library as a corpus.

    Skip files that are blank or not UTF-8. Raises DataError if no file remains.
    """
    root = Path(sysconfig.get_path("stdlib"))
    facts, paths = with_text(python_files(root), cache_dir)
    if not paths:
        raise DataError(f"data=stdlib: {root} contains no .py files; use data=files")
    hashes = [facts[path].sha256 for path in paths]
    identity = combined_hash(["stdlib", *hashes])
    origin = f"standard library of Python {platform.python_version()}"
    return corpus_of(cfg, facts, paths, origin, identity)


def with_text(paths: Sequence[Path], cache_dir: Path) -> tuple[dict[Path, FileFacts], list[Path]]:
    """Return the properties of all files, and the paths of the UTF-8 files that are not blank."""
    facts = dict(zip(paths, file_facts(paths, cache_dir), strict=True))
    text_paths = [path for path, file in facts.items() if file.is_utf8 and not file.is_blank]
    return facts, text_paths


def corpus_of(
    cfg: DataConfig, facts: dict[Path, FileFacts], paths: Sequence[Path], origin: str, identity: str
) -> Corpus:
    """Make a corpus from the files in `paths`, with one document per file.

    `facts` contains properties of these files and of skipped files. `origin` describes the origin
    of the files. `identity` is a hash of the contents of the files in `paths`.
    """
    read_facts = {path: facts[path] for path in paths}
    # `sample_by` of the config is only for text files of data=files.
    by_document = replace(cfg, sample_by=SampleBy.document)
    return Corpus(
        description=f"{origin}, {len(paths)} files",
        identity=identity,
        list_parts=lambda: parts_of(read_facts, by_document),
        check=partial(check_all, read_facts),
        skipped_empty=sum(file.is_blank for file in facts.values()),
        skipped_undecodable=sum(not file.is_utf8 for file in facts.values()),
    )


def python_files(root: Path) -> list[Path]:
    """Return the .py files below `root`, sorted by path; skip site-packages and dist-packages."""
    excluded = {"site-packages", "dist-packages", "__pycache__"}
    paths = []
    for directory, subdirectories, names in os.walk(root):
        # `os.walk` searches only the directories that remain in its list.
        subdirectories[:] = [name for name in subdirectories if name not in excluded]
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    # As POSIX paths, so that the order and the hash of the corpus do not depend on the system.
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def package_files(name: str) -> list[Path]:
    """Return the .py files of the installed package `name`, without importing the package.

    Skip generated files, and the top-level `__init__.py`, which differs in Windows wheels. Return
    an empty list if the package is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0])
    files = []
    for path in python_files(root):
        place = path.relative_to(root.parent).as_posix()
        is_excluded = (
            path.name in GENERATED
            or path == root / "__init__.py"
            or place.startswith(ONLY_SOME_BUILDS)
        )
        if not is_excluded:
            files.append(path)
    return files


def texts_hash(facts: Sequence[FileFacts]) -> str:
    return combined_hash([file.sha256 for file in facts])


def difference(hashes: dict[str, str]) -> str:
    differing = []
    for name, (version, sha256) in REFERENCE_PACKAGES.items():
        if hashes[name] == sha256:
            continue
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "missing"
        # An edited or repackaged installation has the version of the reference.
        files_note = " with other files" if installed == version else ""
        differing.append(f"{name} {installed}{files_note} (reference {version})")
    return f"not the reference corpus: {', '.join(differing)}"
