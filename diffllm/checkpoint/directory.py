"""The checkpoints of a run: when they are written, which exist, can be used and are kept."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from diffllm.checkpoint.manifest import faults, read_manifest
from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import CheckpointError, ConfigError, UserError, listed
from diffllm.core.files import fresh
from diffllm.core.printing import to_stderr

SECONDS = {"s": 1, "min": 60, "h": 3600}
SAVED = "saved.json"
"""The file of a run that names the step that was saved last. It is next to `checkpoints/`, whose
disk may not be mounted."""
DURATION = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(SECONDS)})")


@dataclass
class CheckpointConfig:
    """When checkpoints are written, and how many of them stay."""

    interval: int | str = 100
    """Steps (100) or time (30min, 90s, 1.5h) between checkpoints. The last step always has one."""
    keep_last: int = bounded(2, least=0)
    """Number of newest checkpoints that stay; 0 keeps all."""
    keep_every: int = bounded(0, least=0)
    """Checkpoints at multiples of this many steps stay for good; 0 is off."""

    @property
    def steps(self) -> int:
        """Steps between checkpoints; 0 where a time is between them."""
        return self.interval if isinstance(self.interval, int) else 0

    @property
    def seconds(self) -> float | None:
        """Seconds between checkpoints; None where steps are between them."""
        match = DURATION.fullmatch(str(self.interval))
        return float(match[1]) * SECONDS[match[2]] if match else None

    def validate(self) -> None:
        check_bounds("checkpoint.", self)
        if self.steps < 1 and not self.seconds:
            raise ConfigError(f"checkpoint.interval={self.interval} must be as 100, 90s or 30min")


T = TypeVar("T")
ATTEMPTS = 20
"""Checkpoints that a reader tries while their run deletes them."""


def step_of(path: Path) -> int:
    return int(path.name.removesuffix(".incomplete").rpartition("-")[2])


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def hidden_path(directory: Path, step: int) -> Path:
    return directory / f".step-{step:08d}.incomplete"


def list_checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints below `directory`, whole or damaged, oldest first."""
    found = (p for p in directory.glob("step-*") if re.fullmatch(r"step-\d{1,18}", p.name))
    return sorted((p for p in found if p.is_dir()), key=step_of)


def list_incomplete(directory: Path) -> list[Path]:
    """List the remains of saves that were cut short, and a save under way."""
    found = directory.glob(".step-*.incomplete")
    return sorted(p for p in found if re.fullmatch(r"\.step-\d{1,18}\.incomplete", p.name))


def newest_good(paths: Sequence[Path]) -> Path | None:
    """Return the last complete checkpoint of `paths`, or None.

    Later ones are damaged and named on stderr, unless their run has deleted them meanwhile. Raises
    CheckpointError if all are damaged.
    """
    damaged: list[str] = []
    for path in reversed(paths):
        if problems := faults(path):
            damaged += [f"{path} ({listed(problems)})"] if path.exists() else []
            continue
        for name in damaged:
            to_stderr(f"warning: damaged checkpoint {name} is ignored; continuing from {path.name}")
        return path
    if damaged:
        raise CheckpointError(f"no checkpoint can be used: {'; '.join(damaged)}")
    return None


def check_checkpoint(path: Path) -> None:
    """Raise CheckpointError unless `path` is a checkpoint and every file is as it was written."""
    read_manifest(path)
    if problems := faults(path):
        raise CheckpointError(f"checkpoint {path} is damaged: {listed(problems)}")


def find_checkpoint(run: Path, step: int = 0) -> Path:
    """Find a run's whole checkpoint, at step 0 the newest; raises CheckpointError without one."""
    found = {step_of(path): path for path in list_checkpoints(run / "checkpoints")}
    if not found:
        raise CheckpointError(f"{run} has no complete checkpoint")
    if step not in (0, *found):
        raise CheckpointError(f"{run} has no checkpoint of step {step}; there are {sorted(found)}")
    if step:
        check_checkpoint(found[step])
        return found[step]
    return newest_good(list(found.values())) or find_checkpoint(run)  # all are deleted by now


def with_checkpoint(run: Path, step: int, use: Callable[[Path], T]) -> T:
    """Return `use(find_checkpoint(run, step))`; try again if the run deletes it meanwhile."""
    for _ in range(ATTEMPTS):
        path = find_checkpoint(run, step)
        try:
            return use(path)
        except (UserError, OSError):
            if path.exists():
                raise
    raise CheckpointError(
        f"{path} was deleted while it was read: its run keeps the newest checkpoint.keep_last"
    )


def remove(path: Path) -> None:
    """Delete a directory, or whatever else has its name, but not what a link points to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def set_aside(path: Path) -> None:
    """Rename a checkpoint that stands where the one of the same step belongs, and say so."""
    aside = fresh(path.with_name(f"damaged-{path.name}"))
    path.rename(aside)
    to_stderr(f"warning: {path} was in the way of a new checkpoint; it is now {aside.name}")


def prune(paths: Sequence[Path], cfg: CheckpointConfig) -> None:
    """Delete the checkpoints that need not stay; `paths` are oldest first."""
    for path in paths[: -cfg.keep_last] if cfg.keep_last else []:
        if cfg.keep_every and step_of(path) % cfg.keep_every == 0:
            continue
        hidden = hidden_path(path.parent, step_of(path))
        try:
            path.rename(hidden)  # so that no half of it is ever taken for a damaged one
            remove(hidden)
        except OSError as error:
            why = error.strerror or error
            to_stderr(f"warning: old checkpoint {path} cannot be deleted: {why}")
