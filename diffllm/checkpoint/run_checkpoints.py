"""Find, check and delete the checkpoints of a run."""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from diffllm.checkpoint.manifest import faults, read_manifest
from diffllm.core.bounds import check_bounds
from diffllm.core.errors import CheckpointError, ConfigError, UserError, listed
from diffllm.core.held_directories import numbered
from diffllm.core.keys import key
from diffllm.core.printing import to_stderr
from diffllm.core.run_files import RunFolder, hidden_path, list_checkpoints, step_of

SECONDS = {"s": 1, "min": 60, "h": 3600}
DURATION = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(SECONDS)})")


@dataclass
class CheckpointConfig:
    """Settings that control when checkpoints are saved and which old checkpoints are deleted."""

    interval: int | str = key(
        100,
        effect="speed",
        help="Steps (100) or time (30min, 90s, 1.5h) between checkpoints. The last step is "
        "always saved.",
    )
    keep_last: int = key(
        2,
        least=0,
        effect="none",
        help="Number of newest checkpoints to keep; 0 keeps all.",
    )
    keep_every: int = key(
        0,
        least=0,
        effect="none",
        help="Checkpoints at multiples of this number of steps are never deleted; 0 turns this "
        "off.",
    )

    @property
    def steps(self) -> int:
        """Return `interval` in training steps; 0 if `interval` is a time."""
        return self.interval if isinstance(self.interval, int) else 0

    @property
    def seconds(self) -> float | None:
        """Return `interval` in seconds; None if `interval` is a number of training steps."""
        match = DURATION.fullmatch(str(self.interval))
        return float(match[1]) * SECONDS[match[2]] if match else None

    def validate(self) -> None:
        check_bounds("checkpoint.", self)
        if self.steps < 1 and not self.seconds:
            raise ConfigError(
                f"checkpoint.interval={self.interval} must be a number of steps above 0, such as "
                "100, or a time, such as 90s, 30min or 1.5h"
            )


T = TypeVar("T")
ATTEMPTS = 20
"""Maximum number of attempts of a reader whose run deletes checkpoints during the read."""


def newest_text(directory: Path) -> str:
    """Describe the newest checkpoint in `directory`; signal handlers may call this."""
    checkpoints = list_checkpoints(directory)
    if not checkpoints:
        return "no checkpoint is saved"
    return f"the newest checkpoint is {checkpoints[-1]}"


def newest_good(paths: Sequence[Path]) -> Path | None:
    """Return the newest undamaged checkpoint directory in `paths`, which is sorted oldest first.

    Print a warning for each damaged checkpoint that is newer than the result. Training may delete
    checkpoints during the check; ignore the deleted checkpoints. If no checkpoint remains, return
    None. Raises CheckpointError if checkpoints remain and all of them are damaged.
    """
    damaged: list[str] = []
    for path in reversed(paths):
        problems = faults(path)
        if problems:
            # Training may have deleted the checkpoint during the check.
            if path.exists():
                damaged.append(f"{path} ({listed(problems)})")
            continue
        for name in damaged:
            to_stderr(f"warning: damaged checkpoint {name} is ignored; using {path.name}")
        return path
    if damaged:
        raise CheckpointError(
            f"all checkpoints are damaged: {'; '.join(damaged)}; "
            "restore a backup or start a new run"
        )
    return None


def check_checkpoint(path: Path) -> None:
    """Raise CheckpointError if `path` is not a checkpoint directory, or contains a damaged file."""
    read_manifest(path)
    problems = faults(path)
    if problems:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {listed(problems)}; use another checkpoint"
        )


def find_checkpoint(run: Path, step: int = 0) -> Path:
    """Return the checkpoint directory of training step `step` in the run directory `run`.

    If `step` is 0, return the newest undamaged checkpoint directory. Raises CheckpointError if the
    checkpoint of step `step` is missing or damaged, or if the run has no undamaged checkpoint.
    """
    checkpoints = {step_of(path): path for path in list_checkpoints(run / RunFolder.CHECKPOINTS)}
    if not checkpoints:
        raise CheckpointError(
            f"{run} has no complete checkpoint; resume the run until a checkpoint is saved"
        )
    if step not in (0, *checkpoints):
        raise CheckpointError(
            f"{run} has no checkpoint of step {step}; available steps: {sorted(checkpoints)}"
        )
    if step:
        check_checkpoint(checkpoints[step])
        return checkpoints[step]
    # None: the run deleted all checkpoints of the list during the check, so list again.
    return newest_good(list(checkpoints.values())) or find_checkpoint(run)


def with_checkpoint(run: Path, step: int, use: Callable[[Path], T]) -> T:
    """Call `use` with the directory from `find_checkpoint(run, step)`; return the result of `use`.

    If `use` fails because training deleted the directory, call `find_checkpoint` and `use` again.
    Raises CheckpointError after 20 such failures.
    """
    for _ in range(ATTEMPTS):
        path = find_checkpoint(run, step)
        try:
            return use(path)
        except (UserError, OSError):
            # The error has another cause if training has not deleted the checkpoint.
            if path.exists():
                raise
    raise CheckpointError(
        f"{path} was deleted by its training run; increase checkpoint.keep_last of this run"
    )


def remove(path: Path) -> None:
    """Delete a file, a directory tree or a symbolic link; do not delete the target of a link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def set_aside(path: Path) -> None:
    """Rename the checkpoint directory `path` to an unused name with prefix "damaged-".

    A new checkpoint can then use the old name. Print a warning.
    """
    names = numbered(path.with_name(f"damaged-{path.name}"))
    aside = next(name for name in names if not os.path.lexists(name))
    path.rename(aside)
    to_stderr(f"warning: renamed {path} to {aside.name}: a new checkpoint needs the name")


def prune(paths: Sequence[Path], cfg: CheckpointConfig) -> None:
    """Delete old checkpoint directories in `paths`, which is sorted oldest first.

    Keep the newest `cfg.keep_last` checkpoints; if this setting is 0, keep all checkpoints. If
    `cfg.keep_every` is not 0, also keep the checkpoints at multiples of `cfg.keep_every` steps.
    Print a warning for each failed deletion.
    """
    if not cfg.keep_last:
        return
    for path in paths[: -cfg.keep_last]:
        if cfg.keep_every and step_of(path) % cfg.keep_every == 0:
            continue
        hidden = hidden_path(path.parent, step_of(path))
        try:
            # An interrupted deletion must not look like a damaged checkpoint.
            path.rename(hidden)
            remove(hidden)
        except OSError as error:
            reason = error.strerror or error
            to_stderr(f"warning: old checkpoint {path} cannot be deleted: {reason}")
