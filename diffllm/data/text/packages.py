"""Python packages that diffllm depends on as a corpus: the same text on every machine."""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from diffllm.core.errors import DataError
from diffllm.core.registry import source
from diffllm.data.config import DataConfig
from diffllm.data.text.corpus import Corpus
from diffllm.data.text.file_index import FileFacts, combined_hash, file_facts
from diffllm.data.text.stdlib import corpus_of, python_files


class Package(NamedTuple):
    """A package of the reference corpus."""

    version: str
    sha256: str
    """Hash over its texts."""


REFERENCE = {
    "matplotlib": Package(
        "3.11.2", "cad39bc71dfe10a5c3e9550ba1df5fc9cd251d4198e395c5246702678e8e099c"
    ),
    "networkx": Package(
        "3.6.1", "d90ac404778b6b3cf9e89b5b6d40dee6be2bf5a46048bb46655644079d33071a"
    ),
    "numpy": Package("2.4.6", "411d9a04e7518665ea992af9ea52b935947ff22f0b349c475b4d7c866ed8df32"),
    "pandas": Package("3.1.1", "e2362b554ef760ad949d6e68bdcabeee3a05be1a82aef8ef8943fbacda8319fc"),
    "scipy": Package("1.17.1", "f00b62b844b5ca5f5aa4be2a1c20f999c8e0b7f5d3ab6452a2a03811f016d527"),
    "sympy": Package("1.14.0", "9f54be8db41058e181a3eef835da3e1c2db4ef184f8f2c0e77c79491b92b55de"),
}
"""The packages in corpus order, at the versions of constraints.txt.

torch is not among them: its versions vary most between machines (CUDA builds, `torch>=2.11`).
"""
REFERENCE_SHA256 = "1222415951b03a9bb3e5c9a67672e14b6ac6e8092f1ab990d6e5da60c1214b1d"
"""Hash over all texts of the reference corpus, in corpus order."""

GENERATED = {"__config__.py", "version.py", "_version.py", "_version_meson.py"}
"""Names of files that a build writes: they differ between builds of one version."""
ONLY_SOME_BUILDS = ("numpy/distutils/",)
"""Directories that wheels contain for some Python versions only."""


@source("packages")
def packages(cfg: DataConfig, cache_dir: Path) -> Corpus:
    """Open the .py files of the packages in REFERENCE; raises DataError if none is installed.

    Generated files, files without text and exact duplicates are skipped. `Corpus.note` names the
    packages whose texts differ from the reference.
    """
    found = {name: package_files(name) for name in REFERENCE}
    paths = [path for files in found.values() for path in files]
    facts = dict(zip(paths, file_facts(paths, cache_dir), strict=True))
    texts = [path for path in paths if facts[path].is_text]
    if not texts:
        raise DataError(f"data=packages: none of {', '.join(REFERENCE)} is installed")
    by_text: dict[str, Path] = {}
    for path in texts:
        by_text.setdefault(facts[path].sha256, path)
    kept = list(by_text.values())
    hashes = {name: texts_hash([facts[path] for path in files]) for name, files in found.items()}
    identity = texts_hash([facts[path] for path in kept])
    note = "" if identity == REFERENCE_SHA256 else difference(hashes)
    return corpus_of(cfg, facts, kept, f"source of {', '.join(REFERENCE)}", identity, note)


def package_files(name: str) -> list[Path]:
    """List the .py files of an installed package, sorted by relative path, without generated ones.

    The top-level `__init__.py` is skipped: wheels for Windows change it. The package is not
    imported. Returns nothing for a package that is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0])

    def is_source(path: Path) -> bool:
        relative = path.relative_to(root.parent).as_posix()
        return (
            path.name not in GENERATED
            and path != root / "__init__.py"
            and not relative.startswith(ONLY_SOME_BUILDS)
        )

    return [path for path in python_files(root) if is_source(path)]


def texts_hash(facts: Sequence[FileFacts]) -> str:
    """Compute the SHA-256 over the hashes of files, in order."""
    return combined_hash([each.sha256 for each in facts])


def difference(hashes: dict[str, str]) -> str:
    """Name the packages whose texts differ from the reference, with both versions."""
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
