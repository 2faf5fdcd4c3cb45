"""Find runs and sweeps on disk."""

import glob
import os
from pathlib import Path
from typing import NamedTuple

from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.files import similar_path, user_path
from diffllm.core.names import directory_name
from diffllm.core.run_files import RunFile, RunFolder, SweepFile, read_record

DEPTH = 4
MOST_NAMES, MOST_WAITING = 4, 8


class Directories(NamedTuple):
    runs: list[Path]
    sweeps: list[Path]
    title: str
    home: Path | None
    """The directory for a report, see `home_of`."""


def find_runs(named: list[Path]) -> Directories:
    """Find all runs and sweeps in and below the directories in `named`, which can be globs.

    Raises ConfigError if there is no run in or below one of the paths.
    """
    if not named:
        raise ConfigError(
            "no run directory is given; name at least one run directory, sweep directory or glob"
        )
    directories: list[Path] = []
    searched: list[Path] = []
    for name in named:
        path = user_path(name, "DIR")
        named_directories = expand_glob(path)
        places: list[Path] = []
        for directory in named_directories:
            places += search(directory)
        if not any(is_run(place) for place in places):
            raise ConfigError(
                f"{path} is not a run directory and contains none; a run directory contains "
                "config.yaml and metrics.jsonl"
            )
        directories += named_directories
        searched += places
    distinct = distinct_paths(searched)
    runs = []
    sweeps = []
    for path in distinct:
        if is_run(path):
            runs.append(path)
        if os.path.isfile(path / SweepFile.RECORD):
            sweeps.append(path)
    titles = []
    for path in named:
        # A glob has no directory name.
        title = directory_name(path) if path.is_dir() else str(path)
        if title not in titles:
            titles.append(title)
    return Directories(runs, sweeps, shortlist(titles, MOST_NAMES), home_of(directories))


def distinct_paths(paths: list[Path]) -> list[Path]:
    """Return the shortest of the paths to each directory, sorted by directory."""
    shortest: dict[Path, Path] = {}
    # Links can give several paths to one directory; a run must not count twice.
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        shortest.setdefault(path.resolve(), path)
    return [shortest[directory] for directory in sorted(shortest)]


def shortlist(names: list[str], most: int) -> str:
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def home_of(directories: list[Path]) -> Path | None:
    """Return the default output directory of a report about runs in `directories`.

    The default is the deepest directory that contains all `directories`. If it is inside the
    current directory, return a relative path. Otherwise, return an absolute path if the default is
    one of `directories` or the parent of one of them. Return None if it is a higher directory,
    which may belong to other users, or the root directory.
    """
    absolute_paths = []
    near_paths: set[Path] = set()
    for directory in directories:
        path = Path(os.path.abspath(directory))
        absolute_paths.append(path)
        near_paths.update((path, path.parent))
    home = Path(os.path.commonpath(absolute_paths))
    if home.is_relative_to(Path.cwd()):
        return home.relative_to(Path.cwd())
    # The root directory is its own parent.
    is_root = home == home.parent
    return home if home in near_paths and not is_root else None


def expand_glob(path: Path) -> list[Path]:
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise ConfigError(
                f"{path} cannot be read: permission denied; make the directory readable"
            )
        return [path]
    matches = []
    for name in glob.glob(str(path), recursive=True):
        match = Path(name)
        if match.is_dir():
            matches.append(match)
    matches.sort()
    if not matches:
        raise ConfigError(f"{path}: no such directory{similar_path(path, os.path.isdir)}")
    return matches


def directories_with_runs(path: Path) -> list[Path]:
    """Return the directories of `path`, which can be a glob, that are or contain runs."""
    directories = []
    for directory in expand_glob(path):
        if any(is_run(place) for place in search(directory)):
            directories.append(directory)
    return directories


def is_run(path: Path) -> bool:
    # A run that has no metrics yet has both config.yaml and checkpoints/.
    has_config = os.path.isfile(path / RunFile.CONFIG)
    has_started = has_config and os.path.isdir(path / RunFolder.CHECKPOINTS)
    return has_started or os.path.isfile(path / RunFile.METRICS)


def search(path: Path, depth: int = DEPTH) -> list[Path]:
    """Return `path` and the directories below it, at most `depth` levels deep.

    Hidden directories are omitted. Run directories and unreadable directories are not searched.
    """
    is_readable = os.access(path, os.R_OK | os.X_OK)
    if is_run(path) or not depth or not is_readable:
        return [path]
    # Not `rglob`: that would also list the checkpoints and token shards of every run.
    directories = [path]
    for child in path.iterdir():
        if not child.name.startswith(".") and os.path.isdir(child):
            directories += search(child, depth - 1)
    return directories


def sweep_notes(sweep: Path) -> list[str]:
    try:
        planned = (read_record(sweep / SweepFile.RECORD) or {}).get("runs")
    except CheckpointError as error:
        return [f"{error}; the runs that have not started are unknown."]
    if not isinstance(planned, dict):
        return [
            f"{sweep / SweepFile.RECORD} names no runs; the runs that have not started are unknown."
        ]
    waiting = [name for name in planned if not is_run(sweep / name)]
    if not waiting:
        return []
    count = f"{len(waiting)} of {len(planned)} runs of {sweep} have not started"
    return [f"{count}: {shortlist(waiting, MOST_WAITING)}."]
