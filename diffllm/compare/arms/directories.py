"""Find runs and sweeps on disk."""

import glob
import os
from pathlib import Path
from typing import NamedTuple

from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.files import similar_path, user_path
from diffllm.core.names import directory_name
from diffllm.metrics.records import read_record

DEPTH = 4
NAMES, WAITING = 4, 8


class Found(NamedTuple):
    runs: list[Path]
    sweeps: list[Path]
    title: str
    home: Path | None
    """The directory for a report, see `home_of`."""


def find_runs(named: list[Path]) -> Found:
    """Find all runs and sweeps in and below the directories in `named`, which can be globs.

    Raises ConfigError if there is no run in or below one of the paths.
    """
    if not named:
        raise ConfigError(
            "no run directory is given; name at least one run directory, sweep directory or glob"
        )
    directories: list[Path] = []
    searched: list[Path] = []
    for path in (user_path(path, "DIR") for path in named):
        below = expand_glob(path)
        found = [place for directory in below for place in search(directory)]
        if not any(map(is_run, found)):
            raise ConfigError(
                f"{path} is not a run directory and contains none; a run directory contains "
                "config.yaml and metrics.jsonl"
            )
        directories += below
        searched += found
    shortest_first = sorted(searched, key=lambda path: (len(path.parts), path))
    names = {path.resolve(): path for path in reversed(shortest_first)}
    places = [names[directory] for directory in sorted(names)]
    sweeps = [place for place in places if os.path.isfile(place / "sweep.json")]
    titles = [directory_name(p) if p.is_dir() else str(p) for p in named]
    title = shortlist(list(dict.fromkeys(titles)), NAMES)
    return Found(list(filter(is_run, places)), sweeps, title, home_of(directories))


def shortlist(names: list[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def home_of(directories: list[Path]) -> Path | None:
    """Return the default output directory of a report about runs in `directories`.

    The default is the deepest directory that contains all `directories`. If it is inside the
    current directory, return a relative path. Otherwise, return an absolute path if the default is
    one of `directories` or the parent of one of them. Return None if it is a higher directory,
    which may belong to other users, or the root directory.
    """
    absolute = [Path(os.path.abspath(directory)) for directory in directories]
    home = Path(os.path.commonpath(absolute))
    if home.is_relative_to(Path.cwd()):
        return home.relative_to(Path.cwd())
    theirs = home in absolute or home in [path.parent for path in absolute]
    return home if theirs and home != home.parent else None


def expand_glob(path: Path) -> list[Path]:
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise ConfigError(
                f"{path} cannot be read: permission denied; make the directory readable"
            )
        return [path]
    matches = sorted(filter(Path.is_dir, map(Path, glob.glob(str(path), recursive=True))))
    if not matches:
        raise ConfigError(f"{path}: no such directory{similar_path(path, os.path.isdir)}")
    return matches


def directories_with_runs(path: Path) -> list[Path]:
    """Return the directories of `path`, which can be a glob, that are or contain runs."""
    return [place for place in expand_glob(path) if any(map(is_run, search(place)))]


def is_run(path: Path) -> bool:
    begun = os.path.isfile(path / "config.yaml") and os.path.isdir(path / "checkpoints")
    return begun or os.path.isfile(path / "metrics.jsonl")


def search(path: Path, depth: int = DEPTH) -> list[Path]:
    """Return `path` and the directories below it, at most `depth` levels deep.

    Hidden directories are omitted. Run directories and unreadable directories are not searched.
    """
    if is_run(path) or not depth or not os.access(path, os.R_OK | os.X_OK):
        return [path]
    children = [p for p in path.iterdir() if not p.name.startswith(".") and os.path.isdir(p)]
    return [path, *(found for child in children for found in search(child, depth - 1))]


def sweep_notes(sweep: Path) -> list[str]:
    try:
        planned = (read_record(sweep / "sweep.json") or {}).get("runs")
    except CheckpointError as error:
        return [f"{error}; the runs that have not started are unknown."]
    if not isinstance(planned, dict):
        return [f"{sweep}/sweep.json names no runs; the runs that have not started are unknown."]
    waiting = [name for name in planned if not is_run(sweep / name)]
    count = f"{len(waiting)} of {len(planned)} runs of {sweep} have not started"
    return [f"{count}: {shortlist(waiting, WAITING)}."] if waiting else []
