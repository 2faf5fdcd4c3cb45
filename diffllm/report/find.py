"""From what a user names to run directories: runs, sweeps, and globs of either."""

import glob
import os
from pathlib import Path
from typing import NamedTuple

from diffllm.errors import ConfigError

DEPTH = 4
"""How far below a named directory runs are looked for."""


class Found(NamedTuple):
    """Run directories, and where their report belongs."""

    runs: list[Path]
    """Each once, in order of their paths."""
    home: Path
    """The named directory, or the closest one that holds all that were named."""


def find_runs(named: list[Path]) -> Found:
    """The runs in directories and globs.

    Raises:
        ConfigError: nothing is named, a path does not exist or is a file, a glob matches no
            directory, or one of them leads to no run.
    """
    if not named:
        raise ConfigError("no run is named: give run directories, sweep directories or globs")
    directories: list[Path] = []
    runs: dict[Path, Path] = {}
    for path in map(Path.expanduser, named):
        below = expand(path)
        found = [run for directory in below for run in runs_below(directory)]
        if not found:
            raise ConfigError(f"{path}: no run in it (a run has config.yaml and metrics.jsonl)")
        directories += below
        for run in found:
            same = run.resolve()
            runs[same] = min(run, runs.get(same, run), key=lambda path: (len(path.parts), path))
    home = Path(os.path.commonpath([os.path.abspath(directory) for directory in directories]))
    if home.is_relative_to(Path.cwd()):
        home = home.relative_to(Path.cwd())
    return Found([runs[same] for same in sorted(runs)], home)


def expand(path: Path) -> list[Path]:
    """One directory, or the directories that a glob matches, sorted; raises ConfigError."""
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise ConfigError(f"{path} cannot be read: permission denied")
        return [path]
    if path.exists():
        raise ConfigError(f"{path} is a file; name the run's directory")
    if not glob.has_magic(str(path)):
        raise ConfigError(f"{path} does not exist")
    matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    matches = [match for match in matches if match.is_dir()]
    if not matches:
        raise ConfigError(f"{path} matches no directory")
    return matches


def is_run(path: Path) -> bool:
    """Whether a training run has begun there, readable or not."""
    if os.path.isfile(path / "metrics.jsonl"):
        return True
    return os.path.isfile(path / "config.yaml") and os.path.isdir(path / "checkpoints")


def runs_below(path: Path, depth: int = DEPTH) -> list[Path]:
    """The directory itself if it is a run, else the runs below it that can be reached."""
    if is_run(path):
        return [path]
    if not depth or not os.access(path, os.R_OK | os.X_OK):
        return []
    children = [p for p in path.iterdir() if not p.name.startswith(".") and os.path.isdir(p)]
    return [run for child in children for run in runs_below(child, depth - 1)]
