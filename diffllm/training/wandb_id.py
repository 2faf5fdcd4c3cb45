"""The id of a run in wandb: a start keeps the id, or begins a new wandb run with all steps.

wandb cannot replace steps. A resumed run keeps its id if it repeats the steps that wandb has with
the same settings: their values are equal, except for measured times and for rounding on GPUs.
"""

import os

from diffllm.config.changes import Changes, logs_values
from diffllm.config.saved import differences, load_run_config
from diffllm.core.run_files import RunFile, read_facts
from diffllm.distributed.launcher import in_sweep
from diffllm.metrics.history import history
from diffllm.metrics.wandb_config import RUN_ID, resolve_mode, with_variables
from diffllm.metrics.wandb_directories import has_online, wandb_parent
from diffllm.metrics.wandb_start import new_id
from diffllm.metrics.wandb_uploads import uploaded_id
from diffllm.training.run_directory import RunDirectory


def choose_wandb_id(
    directory: RunDirectory, saved_id: str | None, step: int, changes: Changes
) -> tuple[str, str | None]:
    """Return the id of the wandb run, and the reason why a resumed run gets a new id, or None.

    A new id, or the id of a copy that `diffllm wandb` has written online, replaces the former id in
    run.json. Call this before `RunDirectory.begin`, which replaces the saved config.

    Args:
        directory: directory of the run.
        saved_id: id in the checkpoint; None without a checkpoint of this run.
        step: step to resume from; 0 without a checkpoint.
        changes: changes of the data order since the checkpoint.
    """
    path = directory.path
    record = read_facts(path)
    # run.json has precedence: a checkpoint may be older than a new id.
    former_id = record.get("wandb_id")
    if former_id is None or not RUN_ID.fullmatch(former_id):
        former_id = saved_id
    if former_id is None:
        # The runs of a sweep or study share the environment, but need different ids.
        id_of_user = None if in_sweep() else os.environ.get("WANDB_RUN_ID")
        return id_of_user or new_id(), None
    newest_id = uploaded_id(path, former_id, with_variables(directory.cfg.wandb))
    if newest_id:
        former_id = newest_id
        record |= {"wandb_id": newest_id, "wandb_online": True}
        directory.describe(record)
    # The entry describes the former id: a new id is written to run.json without it.
    was_online = record.pop("wandb_online", False)
    if not was_online:
        was_online = has_online(wandb_parent(path), former_id)
    mode = resolve_mode(directory.cfg.wandb)
    if logs_other_values(directory, step, changes):
        reason = f"wandb cannot replace the steps after {step} of run {former_id}"
    elif mode == "offline" and was_online:
        reason = f"an offline start does not know the last step of run {former_id} on the server"
    else:
        return former_id, None
    wandb_id = new_id()
    # Written here, because a start that is killed after `begin` leaves no changes to detect.
    directory.describe({**record, "wandb_id": wandb_id})
    return wandb_id, None if mode == "disabled" else reason


def logs_other_values(directory: RunDirectory, step: int, changes: Changes) -> bool:
    """Return whether the run repeats logged steps after `step` with other settings."""
    path = directory.path
    cfg = directory.cfg
    has_changed = bool(changes or differences(path, cfg, logs_values))
    # Without a checkpoint of this run, the key `resume` decides where the run begins.
    if (path / RunFile.CONFIG).is_file() and not directory.checkpoints:
        has_changed = has_changed or load_run_config(path).resume != cfg.resume
    if not has_changed:
        return False
    return any(line["step"] > step for line in history(path))
