"""From what a user names to run directories: runs, sweeps, and globs of either."""

import glob
import os
from pathlib import Path
from typing import NamedTuple

from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.files import user_path
from diffllm.metrics.records import read_record

DEPTH = 4
"""How far below a named directory runs are looked for."""
NAMES = 4
"""How many named directories a title has."""
WAITING = 8
"""How many runs a note names."""


class Found(NamedTuple):
    """Run directories, and where their report belongs."""

    runs: list[Path]
    """Each once, in order of their paths."""
    sweeps: list[Path]
    """Searched directories that hold a sweep.json; each once."""
    title: str
    """The names that the user gave, in short."""
    home: Path | None
    """The named directory, or the closest one that holds all that were named; None where that one
    is in no way theirs."""


def find_runs(named: list[Path]) -> Found:
    """The runs in directories and globs; raises ConfigError if nothing is named, a path does not
    exist or is a file, a glob matches no directory, or one of them leads to no run."""
    if not named:
        raise ConfigError("no run is named: give run directories, sweep directories or globs")
    directories: list[Path] = []
    searched: list[Path] = []
    for path in (user_path(path, "DIR") for path in named):
        below = expand_glob(path)
        found = [place for directory in below for place in search(directory)]
        if not any(map(is_run, found)):
            raise ConfigError(f"{path}: no run in it (a run has config.yaml and metrics.jsonl)")
        directories += below
        searched += found
    places = each_once(searched)
    sweeps = [place for place in places if os.path.isfile(place / "sweep.json")]
    tops = outermost(directories)
    return Found(list(filter(is_run, places)), sweeps, title_of(named, tops), home_of(tops))


def each_once(paths: list[Path]) -> list[Path]:
    """One of all names of a directory, the shortest, in order of the directories."""
    shortest_first = sorted(paths, key=lambda path: (len(path.parts), path))
    names = {path.resolve(): path for path in reversed(shortest_first)}
    return [names[same] for same in sorted(names)]


def outermost(directories: list[Path]) -> list[Path]:
    """As absolute paths, those that are in none of the others, each once, in their order."""
    paths = dict.fromkeys(Path(os.path.abspath(directory)) for directory in directories)
    return [path for path in paths if not any(parent in paths for parent in path.parents)]


def title_of(named: list[Path], tops: list[Path]) -> str:
    """Name what was asked for: "compare", "compare/*-seed0", "outputs: first, second".

    Args:
        named: as the user wrote them.
        tops: the directories that they lead to, none inside another.
    """
    asked = [p for p in named if not p.is_dir() or Path(os.path.abspath(p)) in tops]
    names = [os.path.basename(os.path.abspath(p)) if p.is_dir() else str(p) for p in asked]
    shown = shortlist(list(dict.fromkeys(names)), NAMES)
    inside = {p.parent for p in asked if p.is_dir()}
    if (
        len(names) < 2
        or len(inside) != 1
        or inside == {Path(".")}
        or not all(map(Path.is_dir, asked))
    ):
        return shown
    return f"{os.path.basename(os.path.abspath(inside.pop()))}: {shown}"


def shortlist(names: list[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def home_of(tops: list[Path]) -> Path | None:
    """The directory that holds them all, relative to the current one if it is in it.

    None for the root, and for a directory outside the current one that holds none of them
    directly: it may be anyone's.
    """
    home = Path(os.path.commonpath(tops))
    if home.is_relative_to(Path.cwd()):
        return home.relative_to(Path.cwd())
    theirs = home in tops or home in [top.parent for top in tops]
    return home if theirs and home != home.parent else None


def expand_glob(path: Path) -> list[Path]:
    """One directory, or the directories that a glob matches, sorted; raises ConfigError."""
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise ConfigError(f"{path} cannot be read: permission denied")
        return [path]
    if path.exists():
        raise ConfigError(f"{path} is a file; name the run's directory")
    if not glob.has_magic(str(path)):
        raise ConfigError(f"{path} does not exist")
    matches = sorted(filter(Path.is_dir, map(Path, glob.glob(str(path), recursive=True))))
    if not matches:
        raise ConfigError(f"{path} matches no directory")
    return matches


def is_run(path: Path) -> bool:
    """Whether a training run has begun there, readable or not."""
    if os.path.isfile(path / "metrics.jsonl"):
        return True
    return os.path.isfile(path / "config.yaml") and os.path.isdir(path / "checkpoints")


def search(path: Path, depth: int = DEPTH) -> list[Path]:
    """The directory and those below it that can be reached; a run's own are left out."""
    if is_run(path) or not depth or not os.access(path, os.R_OK | os.X_OK):
        return [path]
    children = [p for p in path.iterdir() if not p.name.startswith(".") and os.path.isdir(p)]
    return [path, *(found for child in children for found in search(child, depth - 1))]


def sweep_notes(sweep: Path) -> list[str]:
    """The planned runs of sweep.json that have left nothing yet."""
    try:
        record = read_record(sweep / "sweep.json") or {}
    except CheckpointError as error:
        return [f"{error}: which runs have not started is unknown."]
    planned = record.get("runs")
    if not isinstance(planned, dict):
        return [f"{sweep}/sweep.json names no runs: which have not started is unknown."]
    waiting = [name for name in planned if not is_run(sweep / name)]
    if not waiting:
        return []
    count = f"{len(waiting)} of {len(planned)} runs of {sweep} have not started"
    return [f"{count}: {shortlist(waiting, WAITING)}."]
