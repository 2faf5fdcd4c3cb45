"""Versions of plugins: a hash over the sources of each imported plugin."""

import ast
import hashlib
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from diffllm.config.changes import Changes

NOT_OWN = {*sys.stdlib_module_names, "diffllm"}
"""Top-level modules that are not part of a plugin, even where they lie next to it."""
LOADED: dict[str, tuple[ModuleSpec, str]] = {}
"""Versions of the modules that this process has imported as plugins, each with its import."""


def note_version(module: str, spec: ModuleSpec) -> None:
    """Hash a plugin that was just imported; an edited file counts only after the next import."""
    if module not in LOADED or LOADED[module][0] is not spec:
        LOADED[module] = spec, code_hash(spec)


def loaded_version(module: str) -> str:
    """Return the version of a plugin's module in this process."""
    return LOADED[module][1] if module in LOADED else "not imported"


def version_changes(recorded: dict[str, str]) -> Changes:
    """Compare a run's versions of plugins with this process: {"plugins": (before, now)}, or {}.

    Plugins that the run did not have make no difference.
    """
    now = {name: loaded_version(name) for name in recorded}
    changed = [name for name in recorded if recorded[name] != now[name]]
    before, after = (
        ", ".join(version_text(name, versions[name]) for name in changed)
        for versions in (recorded, now)
    )
    return {"plugins": (before, after)} if changed else {}


def version_text(name: str, version: str) -> str:
    """Return 'my_variant@1a2b3c4d'."""
    return f"{name}@{version[:12]}"


def several_versions(records: list[dict[str, str]]) -> dict[str, list[str]]:
    """Return the plugins that runs have in more than one version, each with its versions."""
    found: dict[str, set[str]] = {}
    for name, version in (item for record in records for item in record.items()):
        found.setdefault(name, set()).add(version)
    return {name: sorted(each) for name, each in sorted(found.items()) if len(each) > 1}


def code_hash(spec: ModuleSpec) -> str:
    """Hash the sources of a plugin: names relative to its directory, and contents."""
    place = Path(next(iter(spec.submodule_search_locations or [str(spec.origin)])))
    base = place.parents[spec.name.count(".")]
    digest = hashlib.sha256()
    for file in sorted(sources(spec.name, place, base)):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(base)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def sources(name: str, place: Path, base: Path) -> set[Path]:
    """Find the files of a plugin's code: its module or package, and modules next to it that these
    import. An installed plugin consists of its whole distribution package instead.

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
        if file not in found and file.is_file() and file.is_relative_to(base):
            found.add(file)
            todo += [] if installed else imported_files(file, base)
    return found


def imported_files(file: Path, base: Path) -> Iterator[Path]:
    """Iterate over the files that the import statements of a module may mean."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # not Python source, so nothing has imported it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
        else:
            continue
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        for name in names:
            if level or name.partition(".")[0] not in NOT_OWN:
                yield from named_files(file.parents[level - 1] if level else base, name)


def named_files(directory: Path, name: str) -> Iterator[Path]:
    """Iterate over the files that Python may run for `import NAME`, those of parents first."""
    for part in name.split("."):
        directory /= part
        yield from (directory / "__init__.py", directory.with_name(f"{part}.py"))
