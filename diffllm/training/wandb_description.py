"""Description of a run in wandb: name, group, tags, config and summary; its entries in run.json.

Training and the command `diffllm wandb` use the same functions, so their wandb runs are equal.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffllm.config import TrainConfig
from diffllm.config.saved import yaml_dict
from diffllm.distributed.launcher import in_sweep
from diffllm.metrics.wandb_config import WandbConfig, split_tags, with_defaults
from diffllm.metrics.wandb_directories import has_online, wandb_parent
from diffllm.training.run_directory import RunDirectory


def with_labels(
    wandb_config: WandbConfig,
    cfg: TrainConfig,
    facts: dict[str, Any] | None,
    variables: Mapping[str, str],
) -> WandbConfig:
    """Return `wandb_config` with the group and the tags of a run.

    Args:
        wandb_config: result of `with_variables` or `with_recorded`.
        facts: content of run.json if the run has begun before; None for a new run.
        variables: environment variables of the run.
    """
    tags = split_tags(variables.get("DIFFLLM_WANDB_TAGS"))
    if cfg.run.sweep:
        tags = [*tags, cfg.run.sweep]
    group = default_group(cfg, facts, variables)
    return with_defaults(wandb_config, group, tags)


def default_group(
    cfg: TrainConfig, facts: dict[str, Any] | None, variables: Mapping[str, str]
) -> str:
    """Return the group of a run in wandb if neither wandb.group nor WANDB_RUN_GROUP is set.

    Arguments as in `with_labels`.
    """
    variant = cfg.resolved.choices["attention"]
    if facts is None:
        return variables.get("DIFFLLM_WANDB_GROUP") or variant
    # Older versions recorded no group: the group of their runs is the attention variant.
    return facts.get("wandb_group") or variant


def wandb_arguments(
    cfg: TrainConfig, path: Path, facts: dict[str, Any], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments of `init_options` that the run in `path` has at every start.

    Args:
        facts: content of run.json.
        variables: environment variables of the run.
    """
    config = yaml_dict(cfg)
    # Two commands with equal configs can have different defaults.
    del config["resolved"]["defaults"]
    # The runs of a sweep or study share WANDB_NAME, but need different names.
    variable = "DIFFLLM_WANDB_NAME" if in_sweep(variables) else "WANDB_NAME"
    name = cfg.run.name or variables.get(variable)
    return {
        "directory": path,
        "job_type": cfg.resolved.choices["model"],
        "config": {**config, **without_online(facts)},
        "name": name,
    }


def wandb_ending(summary: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the wandb summary and the exit code of a run; wandb shows diverged runs as failed.

    `summary` is the content of summary.json.
    """
    values = {name: value for name, value in summary.items() if name != "sample"}
    has_failed = bool(summary.get("diverged") or summary.get("stopped"))
    return values, int(has_failed)


def record_wandb(directory: RunDirectory, wandb_id: str) -> None:
    """Write to run.json the id of the wandb run, and whether the wandb run is online.

    The id changes, and the wandb run is online, only after wandb has started. The constructor of
    WandbRun does not wait for a slow start, so call this again at the end.
    """
    facts = directory.facts or {}
    online = has_online(wandb_parent(directory.path), wandb_id)
    if facts.get("wandb_id") == wandb_id and facts.get("wandb_online"):
        online = True  # also if wandb's directory is missing
    recorded = without_online(facts)
    recorded["wandb_id"] = wandb_id
    recorded |= online_entry(online)
    if recorded != facts:
        directory.describe(recorded)


def online_entry(online: bool | None) -> dict[str, bool]:
    """Return the entry of run.json which states that the wandb run is online; {} if it is not."""
    return {"wandb_online": True} if online else {}


def without_online(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "wandb_online"}
