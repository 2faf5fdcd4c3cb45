"""Whether a run may continue, and from what."""

from pathlib import Path
from typing import Any, NamedTuple

from diffllm.checkpoint import check_loop, list_checkpoints, newest_good, read_state
from diffllm.checkpoint.directory import check_whole
from diffllm.config import TrainConfig
from diffllm.run.directory import RunDirectory


class Continuation(NamedTuple):
    """The point from which a run goes on: a start from nothing unless given."""

    finished: bool = False
    """The run has made all its steps."""
    checkpoint: Path | None = None
    """A checkpoint of which every file is as it was written."""
    saved: dict[str, Any] | None = None
    """The content of that checkpoint's state.json, which is read nowhere else."""


def continuation(cfg: TrainConfig, directory: RunDirectory) -> Continuation:
    """Decide whether `cfg` may continue the run of `directory`, and from which checkpoint.

    Config and files are judged here, the order of data, for which the corpus has to be prepared, by
    `state.continued`. Raises ConfigError if another config began the run, or resume=never and there
    is one; CheckpointError if no checkpoint can be used, or the one that `resume` names cannot.
    """
    directory.check()
    if directory.finished():
        return Continuation(finished=True)
    checkpoint = resume_checkpoint(cfg, directory.checkpoints)
    if checkpoint is None:
        return Continuation()
    saved = read_state(checkpoint)
    check_loop(checkpoint, saved)
    return Continuation(checkpoint=checkpoint, saved=saved)


def resume_checkpoint(cfg: TrainConfig, own: list[Path]) -> Path | None:
    """The checkpoint that `resume` means, every file verified; None for a start from nothing.

    Of several, the newest that is whole; those skipped are named on stderr. `own` are those in the
    run's directory, oldest first. Raises CheckpointError if none is whole, or the one named is not.
    """
    if cfg.resume == "never":
        return None
    if own or cfg.resume == "auto":
        return newest_good(own)
    path = Path(cfg.resume).expanduser()
    inside = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if inside:
        return newest_good(inside)
    check_whole(path)
    return path
