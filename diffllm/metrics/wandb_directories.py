"""wandb's directories of a run: find online and offline runs, and keep one run for `wandb sync`."""

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from diffllm.core.files import read_json
from diffllm.core.run_files import RunFolder, finite

ALL_OFFLINE_RUNS = f"{RunFolder.WANDB}/offline-run-*"
"""Pattern of wandb's directories of all offline runs in a run directory."""
TIME = "????????_??????"
"""Pattern of the time in a directory name. A star would also match longer ids."""
OFFLINE_RUNS = f"{RunFolder.WANDB}/offline-run-{TIME}"
"""Pattern of the offline runs of one id, which follows after a dash."""
ONLINE_RUNS = f"{RunFolder.WANDB}/run-{TIME}"
"""Pattern of the online runs of one id, which follows after a dash."""
REPLACED = f"{RunFolder.WANDB}/replaced"
"""Directory of the offline runs of earlier starts, whose lines the newest offline run contains."""


def wandb_parent(directory: Path) -> Path:
    """Return the parent of wandb's directory of a run: WANDB_DIR, else the run directory."""
    return Path(os.environ.get("WANDB_DIR") or directory)


def set_aside(place: Path, run_id: str) -> int:
    """Move the offline runs of earlier starts to REPLACED, so that `wandb sync` finds one run.

    Return the last training step that `wandb sync` has uploaded from them, or -1.

    Args:
        place: parent of wandb's directory.
        run_id: id of the wandb run.
    """
    for offline_run in place.glob(f"{OFFLINE_RUNS}-{run_id}"):
        move_aside(offline_run)
    uploaded = -1
    for file in sync_files(place, run_id):
        with contextlib.suppress(OSError, ValueError):
            summary = read_json(file.parent / "files" / "wandb-summary.json")
            uploaded = max(uploaded, int(finite(summary.get("_step")) or -1))
    return uploaded


def sync_files(place: Path, run_id: str) -> Iterator[Path]:
    """Yield the files that `wandb sync` has written into offline runs; arguments as in `set_aside`.

    `wandb sync` also writes the summary of the run.
    """
    for runs in (OFFLINE_RUNS, f"{REPLACED}/offline-run-{TIME}"):
        yield from place.glob(f"{runs}-{run_id}/*.wandb.sync*")


def is_synced(place: Path, run_id: str) -> bool:
    """Return whether `wandb sync` has uploaded offline runs; arguments as in `set_aside`."""
    return any(True for _ in sync_files(place, run_id))


def move_aside(offline_run: Path) -> None:
    replaced = offline_run.parent.parent / REPLACED
    replaced.mkdir(exist_ok=True)
    offline_run.rename(replaced / offline_run.name)


def has_online(place: Path, run_id: str) -> bool:
    """Return whether an earlier start of a run was online; arguments as in `set_aside`."""
    return any(place.glob(f"{ONLINE_RUNS}-{run_id}"))


def sync_command(place: Path, run_id: str) -> str:
    """Return the shell command that uploads an offline run; arguments as in `set_aside`."""
    # WANDB_DIR may contain runs with longer ids. In a run directory, the shorter pattern is exact.
    runs = OFFLINE_RUNS if os.environ.get("WANDB_DIR") else ALL_OFFLINE_RUNS
    return f"wandb sync {shlex.quote(str(place))}/{runs}-{run_id}"
