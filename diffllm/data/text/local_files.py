"""Find the local files that data.paths lists: files, directories and glob patterns."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from diffllm.core.errors import DataError
from diffllm.core.files import open_regular, similar_path
from diffllm.data.config import DataConfig
from diffllm.data.text.skipped import HIDDEN, NOT_REGULAR, Skipped
from diffllm.data.verified import usable


class LocalFiles(NamedTuple):
    """The files that the entries of data.paths list or find.

    Attributes:
        roots: all files in order, each with its directory of `groups`; a file whose own path is an
            entry has None instead.
        groups: a directory, and the files that one entry finds in this directory. The files may be
            in subdirectories, and other entries may list or find the same files.
        skipped: entries of directories that are not regular files or not searched, with reasons.
    """

    roots: dict[Path, Path | None]
    groups: list[tuple[Path, list[Path]]]
    skipped: Skipped


def paths_of(cfg: DataConfig) -> LocalFiles:
    """Find the files for `cfg.paths`, a list of files, directories and glob patterns.

    Raises DataError if an entry of `cfg.paths` matches nothing, or is not a regular file.
    """
    roots: dict[Path, Path | None] = {}
    groups: list[tuple[Path, list[Path]]] = []
    skipped: Skipped = {}
    for pattern in cfg.paths:
        path = Path(pattern).expanduser().absolute()
        exists = os.path.lexists(path)
        if exists and not path.is_dir():
            # Refuse pipes and sockets, which could block.
            with usable(path), open_regular(path, 2**63, follow=True):
                roots[path] = None
            continue
        names = [path]
        if not exists:
            matches = glob.glob(str(path), recursive=True)
            names = sorted(Path(match) for match in matches)
        if not names:
            near = similar_path(Path(pattern), os.path.exists)
            raise DataError(f"data.paths: {pattern} matches no file or directory{near}")
        files_by_root: dict[Path, list[Path]] = {}
        if all(name.is_dir() for name in names):
            for root in names:
                files_by_root[root], skipped_below = files_below(root)
                skipped |= skipped_below
        else:
            files_by_root, skipped_matches = matches_by_directory(path, names)
            skipped |= skipped_matches
        for root, files in files_by_root.items():
            groups.append((root, files))
            for file in files:
                # The root of an earlier entry stays, also None of a file that is an entry itself.
                roots.setdefault(file, root)
    # One entry of data.paths may list a file or search a directory that another entry skips.
    searched = roots.keys() | {directory for directory, _ in groups}
    skipped = {path: problem for path, problem in skipped.items() if path not in searched}
    return LocalFiles(roots, groups, skipped)


def matches_by_directory(
    pattern: Path, names: Sequence[Path]
) -> tuple[dict[Path, list[Path]], Skipped]:
    """Group the files that a glob pattern matches, and return skipped matches with reasons.

    `names` are the matches, sorted. The directory of a file is its parent or, for a recursive
    pattern, the directory at which the recursion begins. Directories that contain no match, and
    entries that are neither files nor directories, are skipped.
    """
    # Without "**", a directory consists of all parts but the last one.
    depth = pattern.parts.index("**") if "**" in pattern.parts else -1
    searched: set[Path] = set()
    for name in names:
        if not name.is_dir():
            searched.update(name.parents)
    matches: dict[Path, list[Path]] = {}
    skipped: Skipped = {}
    for name in names:
        if name.is_file():
            directory = Path(*name.parts[:depth])
            matches.setdefault(directory, []).append(name)
        elif not name.is_dir():
            skipped[name] = NOT_REGULAR
        elif name not in searched:
            skipped[name] = f"a directory, and {pattern} also matches files"
    return matches, skipped


def files_below(root: Path) -> tuple[list[Path], Skipped]:
    """Return the regular files below a directory, and the skipped entries with reasons.

    Hidden files, hidden subdirectories, and entries that are neither files nor directories are
    skipped. The files are sorted by relative path. Links are followed, but no directory is searched
    twice.
    """
    files: list[Path] = []
    skipped: Skipped = {}
    # Links can form cycles; a directory is known by its path without links.
    seen = {os.path.realpath(root)}
    for directory, subdirectories, names in os.walk(root, onerror=unreadable, followlinks=True):
        for name in (*subdirectories, *names):
            if name.startswith("."):
                skipped[Path(directory, name)] = HIDDEN
        # In reverse order, so that of several links to one directory the first name is used.
        name_by_target: dict[str, str] = {}
        for name in sorted(subdirectories, reverse=True):
            if not name.startswith("."):
                target = os.path.realpath(os.path.join(directory, name))
                name_by_target[target] = name
        unseen = name_by_target.keys() - seen
        # `os.walk` searches the directories that remain in its list, in this order.
        subdirectories[:] = sorted(name_by_target[target] for target in unseen)
        seen |= unseen
        for name in names:
            path = Path(directory, name)
            if path in skipped:
                continue
            if path.is_file():
                files.append(path)
            else:
                skipped[path] = NOT_REGULAR
    return sorted(files, key=lambda path: path.relative_to(root).as_posix()), skipped


def unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
