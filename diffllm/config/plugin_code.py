"""Versions of plugins: a hash over the sources of each imported plugin."""

import ast
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

from diffllm.config.changes import Changes
from diffllm.distributed.consistency import hash_sources
from diffllm.errors import ConfigError

NOT_OWN = {*sys.stdlib_module_names, "diffllm"}
"""Top-level modules that are not part of a plugin, even where they lie next to it."""
LOADED: dict[str, tuple[ModuleSpec, str]] = {}
"""Import and version of each module that this process has imported as a plugin."""


def note_version(module: str, spec: ModuleSpec) -> None:
    """Hash a plugin that was just imported; an edited file counts only after the next import."""
    if module not in LOADED or LOADED[module][0] is not spec:
        place = Path(next(iter(spec.submodule_search_locations or [str(spec.origin)])))
        base = place.parents[spec.name.count(".")]
        LOADED[module] = spec, hash_sources(base, sources(spec.name, place, base))


def loaded_version(module: str) -> str:
    return LOADED[module][1] if module in LOADED else "not imported"


def version_changes(recorded: dict[str, str]) -> Changes:
    """Compare a run's versions of its plugins with this process: {"plugins": (before, now)}."""
    now = {name: loaded_version(name) for name in recorded}
    changed = [name for name in recorded if recorded[name] != now[name]]
    both = versions_text(recorded, changed), versions_text(now, changed)
    return {"plugins": both} if changed else {}


def versions_text(versions: dict[str, str], names: Iterable[str]) -> str:
    """Describe some of the versions: 'one@1a2b3c4d5e6f, two@0a1b2c3d4e5f'."""
    return ", ".join(f"{name}@{versions[name][:12]}" for name in sorted(names))


def several_versions(records: list[dict[str, str]]) -> dict[str, list[str]]:
    """Return the plugins that runs have in more than one version, each with its versions."""
    names = sorted({name for record in records for name in record})
    found = {name: sorted({each[name] for each in records if name in each}) for name in names}
    return {name: versions for name, versions in found.items() if len(versions) > 1}


def sources(name: str, place: Path, base: Path) -> set[Path]:
    """Find a plugin's module or package, and the modules next to it that these import.

    An installed plugin consists of its top-level package.

    Args:
        place: the module's file, or the package's directory.
        base: the directory that Python found it in.
    """
    installed = any(base.glob("*.dist-info"))
    package = base / name.partition(".")[0] if installed else place
    todo = [place, *package.rglob("*.py"), *named_files(base, name)]
    found: set[Path] = set()
    while todo:
        file = todo.pop()
        with suppress(OSError):  # of a name that is too long for a file
            if file not in found and file.is_file() and file.is_relative_to(base):
                found.add(file)
                todo += [] if installed else imported_files(file, base)
    if not found:
        raise ConfigError(f"{name} is in an archive, so no run can record its version")
    return found


def imported_files(file: Path, base: Path) -> Iterator[Path]:
    """Iterate over the files that the import statements of a module may mean."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # not Python source, so nothing has imported it
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level <= len(file.parents):
            start = file.parents[node.level - 1] if node.level else base
            names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
        elif isinstance(node, ast.Import):
            start, names = base, [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] not in NOT_OWN or start != base:
                yield from named_files(start, name)


def named_files(directory: Path, name: str) -> Iterator[Path]:
    """Iterate over the files that Python may run for `import NAME`, those of parents first."""
    for part in name.split("."):
        directory /= part
        yield from (directory / "__init__.py", directory.with_name(f"{part}.py"))
