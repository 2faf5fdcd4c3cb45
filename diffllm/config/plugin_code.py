"""Source files of plugins, and versions of plugins as hashes of these files."""

import ast
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

from diffllm.config.changes import Changes
from diffllm.core.errors import ConfigError

NOT_OWN = {*sys.stdlib_module_names, "diffllm"}
"""Top-level modules that are never part of a plugin, even if they are next to the plugin."""
LOADED: dict[str, tuple[ModuleSpec, str]] = {}
"""Spec and version of each imported plugin; edited files count after the next import."""


def loaded_version(module: str) -> str:
    return LOADED[module][1] if module in LOADED else "not imported"


def version_changes(recorded: dict[str, str]) -> Changes:
    """Compare the plugin versions that a run recorded with the plugins imported in this process.

    `recorded` maps plugins to versions. Return {"plugins": (recorded versions, current versions)}
    for the plugins whose versions differ, or {} if all versions are equal.
    """
    current = {name: loaded_version(name) for name in recorded}
    changed = [name for name in recorded if recorded[name] != current[name]]
    if not changed:
        return {}
    recorded_text = versions_text(recorded, changed)
    current_text = versions_text(current, changed)
    return {"plugins": (recorded_text, current_text)}


def versions_text(versions: dict[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name}@{versions[name][:12]}" for name in sorted(names))


def several_versions(records: list[dict[str, str]]) -> dict[str, list[str]]:
    """Return {plugin: versions} for the plugins of which `records` contain several versions."""
    by_name: dict[str, set[str]] = {}
    for record in records:
        for name, version in record.items():
            by_name.setdefault(name, set()).add(version)
    several = {}
    for name, versions in sorted(by_name.items()):
        if len(versions) > 1:
            several[name] = sorted(versions)
    return several


def sources(name: str, place: Path, base: Path) -> set[Path]:
    """Return the files that determine the version of a plugin.

    For an installed plugin, these are all Python files of its package. For any other plugin, these
    are its Python files and the files in `base` that they import, directly or indirectly. Raises
    ConfigError if no such file is on disk, for example because the plugin is in a zip archive.

    Args:
        name: module name of the plugin.
        place: file or package directory of the plugin.
        base: directory from which Python imports the plugin.
    """
    is_installed = any(base.glob("*.dist-info"))
    package = place
    if is_installed:
        package = base / name.partition(".")[0]
    candidates = [place, *package.rglob("*.py"), *named_files(base, name)]
    files: set[Path] = set()
    while candidates:
        file = candidates.pop()
        # The name of an imported module may be too long for a file.
        with suppress(OSError):
            if file not in files and file.is_file() and file.is_relative_to(base):
                files.add(file)
                # Next to an installed package are all other packages, with their own versions.
                if not is_installed:
                    candidates += imported_files(file, base)
    if not files:
        raise ConfigError(
            f"module {name} must not be in an archive, because runs record source files; "
            "unpack the archive"
        )
    return files


def imported_files(file: Path, base: Path) -> Iterator[Path]:
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        # The file is not Python source, so Python has not imported the file either.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level <= len(file.parents):
            start = file.parents[node.level - 1] if node.level else base
            module = node.module or ""
            # An imported name may be a module, too. `from . import name` has no module.
            names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
        elif isinstance(node, ast.Import):
            start = base
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            # A relative import is never an import of the standard library or of diffllm.
            is_relative = start != base
            if is_relative or name.partition(".")[0] not in NOT_OWN:
                yield from named_files(start, name)


def named_files(directory: Path, name: str) -> Iterator[Path]:
    for part in name.split("."):
        directory /= part
        yield from (directory / "__init__.py", directory.with_name(f"{part}.py"))
