"""Corpora of Python code: installed packages (data=packages), standard library (data=stdlib)."""

import importlib.metadata
import importlib.util
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

REFERENCE = {
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
    """Make a corpus from the .py files of the packages in REFERENCE.

    REFERENCE contains a version and a hash for each package. Skip generated files, blank files and
    duplicates. `Corpus.note` lists the packages that differ from REFERENCE. Raises DataError if
    none of the packages is installed.
    """
    found = {name: package_files(name) for name in REFERENCE}
    facts, texts = with_text([path for files in found.values() for path in files], cache_dir)
    by_text: dict[str, Path] = {}
    for path in texts:
        by_text.setdefault(facts[path].sha256, path)
    if not by_text:
        names = ", ".join(REFERENCE)
        raise DataError(
            f"data=packages reads installed packages, but none of {names} is installed; "
            "install one of these packages or use data=stdlib"
        )
    kept = list(by_text.values())
    hashes = {name: texts_hash([facts[path] for path in files]) for name, files in found.items()}
    identity = texts_hash([facts[path] for path in kept])
    note = "" if identity == REFERENCE_SHA256 else difference(hashes)
    corpus = corpus_of(cfg, facts, kept, f"source of {', '.join(REFERENCE)}", identity)
    return replace(corpus, note=note)


@source("stdlib")
def stdlib(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the .py files of the Python standard library as a corpus.

    Skip files that are blank or not UTF-8. Raises DataError if no file remains.
    """
    root = Path(sysconfig.get_path("stdlib"))
    facts, kept = with_text(python_files(root), cache_dir)
    if not kept:
        raise DataError(f"data=stdlib: {root} contains no .py files; use data=files")
    identity = combined_hash(["stdlib", *(facts[path].sha256 for path in kept)])
    where = f"standard library of Python {platform.python_version()}"
    return corpus_of(cfg, facts, kept, where, identity)


def with_text(paths: Sequence[Path], cache_dir: Path) -> tuple[dict[Path, FileFacts], list[Path]]:
    facts = dict(zip(paths, file_facts(paths, cache_dir), strict=True))
    return facts, [path for path, each in facts.items() if each.is_utf8 and not each.is_blank]


def corpus_of(
    cfg: DataConfig, facts: dict[Path, FileFacts], kept: Sequence[Path], where: str, identity: str
) -> Corpus:
    """Make a corpus from the files in `kept`, with one document per file.

    `facts` contains properties of these files and of skipped files. `where` describes the origin
    of the files. `identity` is a hash of the contents of the files in `kept`.
    """
    of_kept = {path: facts[path] for path in kept}
    whole = replace(cfg, sample_by=SampleBy.document)
    return Corpus(
        description=f"{where}, {len(kept)} files",
        identity=identity,
        list_parts=lambda: parts_of(of_kept, whole),
        check=partial(check_all, of_kept),
        skipped_empty=sum(each.is_blank for each in facts.values()),
        skipped_undecodable=sum(not each.is_utf8 for each in facts.values()),
    )


def python_files(root: Path) -> list[Path]:
    """Return the .py files below `root`, sorted by path; skip site-packages and dist-packages."""
    excluded = {"site-packages", "dist-packages", "__pycache__"}
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in excluded]
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def package_files(name: str) -> list[Path]:
    """Return the .py files of the installed package `name`, without importing the package.

    Skip generated files, and the top-level `__init__.py`, which differs in Windows wheels. Return
    an empty list if the package is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0])
    return [
        path
        for path in python_files(root)
        if path.name not in GENERATED
        and path != root / "__init__.py"
        and not path.relative_to(root.parent).as_posix().startswith(ONLY_SOME_BUILDS)
    ]


def texts_hash(facts: Sequence[FileFacts]) -> str:
    return combined_hash([each.sha256 for each in facts])


def difference(hashes: dict[str, str]) -> str:
    differing = []
    for name, (version, sha256) in REFERENCE.items():
        if hashes[name] == sha256:
            continue
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "missing"
        edited = " with other files" * (installed == version)
        differing.append(f"{name} {installed}{edited} (reference {version})")
    return f"not the reference corpus: {', '.join(differing)}"
