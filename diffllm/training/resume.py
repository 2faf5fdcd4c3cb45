"""The decision whether a run may resume, and from which checkpoint."""

from pathlib import Path
from typing import Any, NamedTuple

from diffllm.checkpoint.directory import (
    SAVED,
    check_checkpoint,
    list_checkpoints,
    newest_good,
    step_of,
)
from diffllm.checkpoint.manifest import read_state
from diffllm.config import TrainConfig
from diffllm.config.schema import Changes, described, is_allowed
from diffllm.config.values import OF_WEIGHTS
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.files import user_path
from diffllm.metrics.records import read_record, read_summary
from diffllm.training.directory import RunDirectory
from diffllm.training.state import LoopState

MAKE_TOKENS = ("corpus", "tokenizer")
"""Keys of the data order that determine the tokens."""


class Continuation(NamedTuple):
    """The point from which a run resumes; step 0 by default."""

    ended: dict[str, Any] | None = None
    """The summary of a run that has ended: nothing is left to do."""
    checkpoint: Path | None = None
    """A checkpoint whose files are verified."""
    saved: dict[str, Any] | None = None
    """The content of that checkpoint's state.json, which is read nowhere else."""


def continuation(cfg: TrainConfig, directory: RunDirectory) -> Continuation:
    """Decide whether `cfg` may continue the run of `directory`, and from which checkpoint.

    This checks config and files; `continued` checks the data order once the corpus is prepared.

    Raises ConfigError for another config, or for resume=never with an existing run, and
    CheckpointError if no checkpoint, or not the one that `resume` names, can be used.
    """
    directory.check()
    if ended := directory.ending():
        return Continuation(ended=ended)
    checkpoint = resume_checkpoint(cfg, directory.checkpoints)
    if checkpoint is None:
        check_nothing_lost(directory.path)
        return Continuation()
    saved = read_state(checkpoint)
    if saved["loop"] is None:
        raise CheckpointError(
            f"{checkpoint} holds parameters alone, so no run can resume from it; "
            f"resume={OF_WEIGHTS}{checkpoint} starts one from them"
        )
    if (made := step_of(checkpoint)) > cfg.steps:
        raise ConfigError(
            f"{checkpoint} has made {made} steps already, more than steps={cfg.steps}: choose "
            f"another run.name, or steps={made} or more"
        )
    return Continuation(checkpoint=checkpoint, saved=saved)


def check_nothing_lost(run: Path) -> None:
    """Raise CheckpointError for a run without checkpoints that had some.

    A run killed before its first checkpoint starts again from step 0.
    """
    lost = read_record(run / SAVED) or read_summary(run)
    if lost is None:
        return
    raise CheckpointError(
        f"{run} has saved step {lost.get('step', lost.get('steps'))}, but {run / 'checkpoints'} "
        "has no checkpoint: is its disk mounted? To train without it: another run.name, "
        f"resume=CHECKPOINT, or delete {run} to begin anew"
    )


def resume_checkpoint(cfg: TrainConfig, own: list[Path]) -> Path | None:
    """Return the newest verified checkpoint that `resume` selects; None to start from step 0.

    Skipped checkpoints are named on stderr. `own` are the run's checkpoints, oldest first. Raises
    CheckpointError if none is whole, or the named one is not.
    """
    if cfg.resume == "never":
        return None
    if own or cfg.resume == "auto" or cfg.resume.startswith(OF_WEIGHTS):
        return newest_good(own)
    path = user_path(cfg.resume, "resume")
    inside = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if inside:
        return newest_good(inside)
    check_checkpoint(path)
    return path


def continued(
    path: Path, saved: dict[str, Any], order: dict[str, Any], allowed: list[str], former: str = ""
) -> tuple[LoopState, Changes]:
    """Return the state of a checkpoint, and the changes of the data order since then.

    A changed order starts at its first sample. Raises CheckpointError for a change that is not
    allowed, or if state.json lacks a key.

    Args:
        path: the checkpoint, for messages.
        saved: the content of its state.json.
        order: decides which samples a step reads from here on.
        allowed: keys of `order` that may differ.
        former: the hash that older versions computed for this corpus; a checkpoint may have it.
    """
    try:
        state = LoopState.of(saved["loop"])
        before = {key: state.order.get(key) for key in order}
        if before.get("corpus") == former:
            before["corpus"] = order["corpus"]
        made_anew = any(before.get(key) != order.get(key) for key in MAKE_TOKENS)
        if made_anew or "tokens" not in state.order:  # as in older checkpoints
            before["tokens"] = order.get("tokens")
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: state.json lacks {error}") from error
    changes = {key: (before[key], order[key]) for key in order if before[key] != order[key]}
    if refused := [key for key in changes if not is_allowed(key, allowed)]:
        raise CheckpointError(
            f"the checkpoint belongs to another order of data ({described(changes)}); to "
            f"resume from it anyway: run.allow_changes=[{','.join([*allowed, *refused])}]"
        )
    if changes.keys() - {"global_batch_size"}:
        state.data = {}
    state.order = order
    return state, changes
