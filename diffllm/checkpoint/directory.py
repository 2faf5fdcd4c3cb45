"""The checkpoints of a run: when they are written, which exist, can be used and are kept."""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TypeVar

from diffllm.checkpoint.manifest import faults, read_manifest
from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import CheckpointError, ConfigError, UserError
from diffllm.core.printing import to_stderr

SECONDS = {"s": 1, "min": 60, "h": 3600}
SAVED = "saved.json"
"""The file of a run that says which step was saved last; beside `checkpoints/`, which may lie on a
disk of its own."""
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
        """Raise ConfigError for values outside their range."""
        check_bounds("checkpoint.", self)
        if self.steps < 1 and not self.seconds:
            raise ConfigError(
                f"checkpoint.interval={self.interval} must be steps, as in 100, or a time above 0, "
                "as in 90s, 30min or 1.5h"
            )


T = TypeVar("T")
ATTEMPTS = 20
"""Checkpoints that a reader tries while their run deletes them."""


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint, complete or not."""
    return int(path.name.removesuffix(".incomplete").rpartition("-")[2])


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of a step's checkpoint once it is complete."""
    return directory / f"step-{step:08d}"


def hidden_path(directory: Path, step: int) -> Path:
    """Return the path of a step's checkpoint while it is written, and while it is deleted."""
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
    """Return the last of `paths` that is as it was written; None if there are none.

    Those behind it are damaged: each is named on stderr and left alone. If all are, the
    CheckpointError names them. One that its run has deleted meanwhile is passed over.
    """
    damaged: list[str] = []
    for path in reversed(paths):
        problems = faults(path)
        if problems and not path.exists():
            continue
        if not problems:
            for name in damaged:
                to_stderr(
                    f"warning: damaged checkpoint {name} is ignored; continuing from {path.name} "
                    "instead"
                )
            return path
        damaged.append(f"{path} ({summary(problems)})")
    if damaged:
        raise CheckpointError(f"no checkpoint can be used: {'; '.join(damaged)}")
    return None


def check_checkpoint(path: Path) -> None:
    """Raise CheckpointError unless `path` is a checkpoint and every file is as it was written."""
    read_manifest(path)
    if problems := faults(path):
        raise CheckpointError(f"checkpoint {path} is damaged: {summary(problems)}")


def find_checkpoint(run: Path, step: int = 0) -> Path:
    """Find a run's whole checkpoint, at step 0 the newest; raises CheckpointError without one."""
    found = {step_of(path): path for path in list_checkpoints(run / "checkpoints")}
    if not found:
        if list(run.glob("model*.safetensors")):
            raise CheckpointError(
                f"{run} holds consolidated parameters, not a run: safetensors.torch.load_file "
                "reads them, and commands read the run that they came from"
            )
        raise CheckpointError(f"{run} has no complete checkpoint yet")
    if step not in (0, *found):
        raise CheckpointError(f"{run} has no checkpoint of step {step}; there are {sorted(found)}")
    if step:
        check_checkpoint(found[step])
        return found[step]
    return newest_good(list(found.values())) or find_checkpoint(run)  # all are deleted by now


def with_checkpoint(run: Path, step: int, use: Callable[[Path], T]) -> T:
    """Call `use` with the checkpoint that `find_checkpoint` finds, and return what it does.

    A run that is under way deletes old checkpoints: where it has deleted this one meanwhile, `use`
    is called with the newest again. Raises CheckpointError if it was that of a given step.
    """
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


def summary(problems: Sequence[str]) -> str:
    """Join the first few of the faults that `verify` found."""
    more = len(problems) - 3
    return "; ".join([*problems[:3], *([f"and {more} more"] if more > 0 else [])])


def remove(path: Path) -> None:
    """Delete a directory, or whatever else has its name, but not what a link points to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def set_aside(path: Path) -> None:
    """Rename a checkpoint that stands where the one of the same step belongs, and say so."""
    names = chain([""], (f"-{number}" for number in count(2)))
    places = (path.with_name(f"damaged-{path.name}{name}") for name in names)
    aside = next(place for place in places if not os.path.lexists(place))
    path.rename(aside)
    to_stderr(f"warning: {path} was in the way of a new checkpoint; it is now {aside.name}")


def outdated(paths: Sequence[Path], cfg: CheckpointConfig) -> list[Path]:
    """Return the checkpoints that need not stay; `paths` are oldest first."""
    if not cfg.keep_last:
        return []
    rest = paths[: -cfg.keep_last]
    return [p for p in rest if not (cfg.keep_every and step_of(p) % cfg.keep_every == 0)]


def delete(path: Path) -> None:
    """Delete a checkpoint so that no half of it is ever taken for a damaged one."""
    hidden = hidden_path(path.parent, step_of(path))
    try:
        path.rename(hidden)
        remove(hidden)
    except OSError as error:
        to_stderr(f"warning: old checkpoint {path} cannot be deleted: {error.strerror or error}")
