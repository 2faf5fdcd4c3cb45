"""Settings of a run in Weights & Biases: config keys, environment variables and their checks."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from diffllm.core.errors import ConfigError
from diffllm.core.keys import key
from diffllm.metrics.alerts import LEVELS, check_alerts
from diffllm.metrics.wandb_start import has_api_key

LONGEST_TAG, LONGEST_NAME = 64, 128
"""Maximum characters that wandb accepts of a tag, and of the name or group of a run."""
PROJECT = re.compile(r"[^/\\#?%:]{1,128}")
"""Project names that wandb accepts."""
MODES = {
    "online": "online", "offline": "offline", "disabled": "disabled", "shared": "shared",
    "run": "online", "dryrun": "offline",
}  # fmt: skip
"""Values of WANDB_MODE; the last two are older names."""
RUN_ID = re.compile(r"[\w-]{1,64}")


class WandbMode(Enum):
    """Mode of wandb.

    The mode auto is replaced by another mode at the start of a run, see `resolve_mode`.
    """

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class WandbConfig:
    """Mode, project, group and tags of the run in Weights & Biases."""

    mode: WandbMode = key(
        WandbMode.auto,
        effect="none",
        help="Destination; auto: WANDB_MODE, else online with an API key, else offline.",
    )
    project: str | None = key(
        None,
        effect="none",
        help="Project of the run; null: WANDB_PROJECT, else diffllm.",
    )
    entity: str | None = key(
        None,
        effect="none",
        help="User or team that owns the project; null: WANDB_ENTITY, else the owner of the API "
        "key.",
    )
    group: str | None = key(
        None,
        effect="none",
        help="Group of the run; null: WANDB_RUN_GROUP, else the default group. The default is "
        "the run's row in the report of its sweep, its arm in a study, or the attention variant.",
    )
    tags: list[str] | None = key(
        None,
        effect="none",
        help="Tags of the run, in addition to its sweep and study; null: WANDB_TAGS, as in a,b.",
    )
    alerts: list[str] = key(
        list(LEVELS),
        effect="none",
        help="Events of online runs that send an alert, at most one per kind and hour. Kinds: "
        "diverged, skipped (10 updates in a row), loss_spike (the first in 1,000 steps) and "
        "stall.",
    )
    cancel_tag: bool = key(
        False,
        effect="none",
        help="Stop and save the run after you add the tag `cancel` in wandb. As after SIGTERM, "
        "but a scheduler does not requeue the run. Tags are read once per minute.",
    )

    def validate(self) -> None:
        check_tags("wandb.tags", self.tags)
        check_alerts(self.alerts)


def check_project(key: str, project: str | None) -> None:
    if project is not None and not PROJECT.fullmatch(project):
        raise ConfigError(
            f"{key}={project[:200]} must have 1 to 128 characters other than / \\ # ? % :"
        )


def check_tags(key: str, tags: list[str] | None) -> None:
    for tag in tags or []:
        if not 1 <= len(tag) <= LONGEST_TAG:
            raise ConfigError(f"{key}: {tag!r} must have 1 to {LONGEST_TAG} characters")


def with_variables(cfg: WandbConfig, variables: Mapping[str, str] = os.environ) -> WandbConfig:
    """Return `cfg` with the values of environment variables for keys that are None.

    The project is then set, unless wandb is disabled. `variables` may also be those that run.json
    records. An empty variable is ignored. Raises ConfigError if a variable that is used has an
    invalid value.
    """
    if resolve_mode(cfg) == "disabled":
        return cfg
    project, tags = cfg.project, cfg.tags
    if project is None:
        project = variables.get("WANDB_PROJECT") or "diffllm"
        check_project("WANDB_PROJECT", project)
    if tags is None:
        tags = split_tags(variables.get("WANDB_TAGS"))
        check_tags("WANDB_TAGS", tags)
    entity = cfg.entity or variables.get("WANDB_ENTITY") or None
    group = cfg.group or variables.get("WANDB_RUN_GROUP") or None
    return replace(cfg, project=project, entity=entity, group=group, tags=tags)


def with_recorded(
    cfg: WandbConfig,
    variables: Mapping[str, str],
    mode: WandbMode | None = None,
    project: str | None = None,
    entity: str | None = None,
) -> WandbConfig:
    """Return the config of a run of an earlier process, whose run.json records `variables`.

    `mode`, `project` and `entity` replace the values of the run. Raises ConfigError as
    `with_variables`.
    """
    if mode is not None:
        cfg = replace(cfg, mode=mode)
    cfg = with_variables(cfg, variables)
    check_project("project", project)
    cfg = replace(cfg, project=project or cfg.project, entity=entity or cfg.entity)
    if cfg.entity is None and os.environ.get("WANDB_ENTITY"):
        cfg = replace(cfg, entity="")  # For None, wandb itself would use the present variable.
    return cfg


def split_tags(text: str | None) -> list[str]:
    """Return the tags in the value of a variable, as in a,b; ignore empty tags."""
    tags = (text or "").split(",")
    return [tag.strip() for tag in tags if tag.strip()]


def with_defaults(cfg: WandbConfig, group: str, tags: Iterable[str] = ()) -> WandbConfig:
    """Return `cfg` with `group` if cfg.group is None, and with additional tags.

    Additional tags are shortened to the length that wandb accepts.
    """
    added = [tag[:LONGEST_TAG] for tag in tags]
    return replace(cfg, group=cfg.group or group, tags=[*(cfg.tags or []), *added])


def check_wandb(cfg: WandbConfig) -> None:
    """Raise ConfigError if the project or a variable that a run with `cfg` uses is invalid.

    Also raise ConfigError if wandb.cancel_tag is set and wandb is not online. Saved configs of
    older versions may contain an invalid project, which disabled wandb.
    """
    mode = resolve_mode(cfg)
    if cfg.cancel_tag and mode in ("offline", "disabled"):
        raise ConfigError(
            f"wandb.cancel_tag=true needs wandb online, but its mode is {mode}; run `wandb login` "
            "and set wandb.mode=online, or set wandb.cancel_tag=false"
        )
    if mode == "disabled":
        return
    check_project("wandb.project", cfg.project)
    with_variables(cfg)
    run_id = os.environ.get("WANDB_RUN_ID")
    if run_id and not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"WANDB_RUN_ID={run_id[:200]} must have 1 to 64 letters, digits, dashes or underscores"
        )


def resolve_mode(cfg: WandbConfig) -> str:
    """Return the mode that is passed to wandb: `cfg.mode`, or the replacement for `auto`.

    For `auto`, return the environment variable WANDB_MODE if it is set. Otherwise
    return "online" if the environment or netrc has an API key for wandb's server, else "offline".
    Raises ConfigError if WANDB_MODE is used and invalid.
    """
    if cfg.mode is not WandbMode.auto:
        return cfg.mode.value
    if mode := os.environ.get("WANDB_MODE"):
        if mode not in MODES:
            raise ConfigError(f"WANDB_MODE={mode[:200]} must be online, offline or disabled")
        return MODES[mode]
    return "online" if has_api_key() else "offline"
