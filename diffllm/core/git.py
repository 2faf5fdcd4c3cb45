"""The Git commit of a directory."""

import subprocess
from pathlib import Path
from typing import Any


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return the Git state: {"commit": hash, "dirty": whether tracked files have changed}.

    Return None if Git is missing, or if Git tracks no file of the directory.
    """
    try:
        # A wheel may be installed in an ignored .venv inside an unrelated repository.
        if not git(directory, "ls-files", "--", "."):
            return None
        commit = git(directory, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(git(directory, "status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def git(directory: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", directory, *words],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
        timeout=10,
    ).stdout.strip()
