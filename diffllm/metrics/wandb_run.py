"""A wandb run whose failures never stop training.

A separate thread makes all calls to wandb, because a call blocks if wandb's service hangs. Training
waits for this thread only at its start and its end, for a limited time. If wandb fails, one line is
printed to stderr and training continues; metrics.jsonl and steps.npy have the same metrics.

wandb's step is the training step. At a resume, the thread first sends the earlier steps that wandb
lacks.
"""

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from diffllm.core.errors import ConfigError
from diffllm.core.keys import key
from diffllm.core.names import directory_name, shortened
from diffllm.core.printing import to_stderr
from diffllm.metrics.alerts import LEVELS, check_alerts
from diffllm.metrics.events import Event
from diffllm.metrics.wandb_directories import has_online, set_aside, wandb_parent
from diffllm.metrics.wandb_events import CancelTag, SentEvents, read_past_events
from diffllm.metrics.wandb_start import (
    abandon_service,
    failed_upload,
    has_api_key,
    log_step,
    new_id,
    refusal_text,
    start,
    tear_down,
)

START_SECONDS = 60
FINISH_SECONDS = 60
POLL_SECONDS = 1
"""Maximum wait for a line until the tag of the run and the table of events are due."""
BACKLOG = 4096
STALL_SECONDS = 10
"""wandb is given up if BACKLOG lines wait and it has taken no line for so long."""
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


def init_options(
    cfg: WandbConfig,
    directory: Path,
    job_type: str,
    config: dict[str, Any],
    run_id: str | None,
    name: str | None = None,
    variables: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Return the options of `wandb.init`; arguments as in WandbRun.

    WANDB_JOB_TYPE in `variables` replaces `job_type`.
    """
    # wandb prefers these options to its variables, so each variable is read here.
    return {
        "project": cfg.project,
        "entity": cfg.entity,
        "name": shortened(name or directory_name(directory), LONGEST_NAME),
        "group": shortened(cfg.group, LONGEST_NAME) if cfg.group else None,
        "job_type": variables.get("WANDB_JOB_TYPE") or job_type,
        "tags": list(dict.fromkeys(cfg.tags or [])),
        "id": run_id or new_id(),
        "dir": str(wandb_parent(directory)),
        "config": config,
    }


class WandbRun:
    """A run in Weights & Biases whose failures do not stop training.

    Args:
        cfg: the result of `with_variables` and `with_defaults`.
        directory: run directory.
        job_type: job type, unless WANDB_JOB_TYPE is set.
        config: content of the wandb config.
        run_id: id of the wandb run to resume; None creates a new run.
        resume: False creates a wandb run instead of resuming `run_id`, see `create_run`.
        name: name of the run in wandb; None: the name of `directory`.
        history: result of `history`, the steps of earlier starts of the run.
        on_cancel: called in another thread after a user has added the tag `cancel`; None ignores
            the tag.
        was_online: whether `run_id` was online before, also if wandb's directory is missing.
    """

    def __init__(
        self,
        cfg: WandbConfig,
        directory: Path,
        job_type: str,
        config: dict[str, Any],
        run_id: str | None,
        resume: bool = True,
        name: str | None = None,
        history: Iterable[dict[str, Any]] = (),
        on_cancel: Callable[[], None] | None = None,
        was_online: bool = False,
    ):
        options = init_options(cfg, directory, job_type, config, run_id, name)
        options["resume"] = "allow" if resume else None
        self.id: str = options["id"]
        """Id of the wandb run; differs from `run_id` if wandb cannot continue that run."""
        self.directory, self.alert_kinds = directory, cfg.alerts
        self.history, self.on_cancel = history, on_cancel
        self.was_online = was_online
        self.mode = resolve_mode(cfg)
        self.working = self.mode != "disabled"
        self.training = True
        """Whether `finish` has not been called yet."""
        self.lines: queue.SimpleQueue[dict[str, Any] | Event | None] = queue.SimpleQueue()
        """Metrics of steps, events, and None at the end."""
        self.taken_at = time.monotonic()
        self.summary: dict[str, Any] = {}
        self.exit_code = 0
        self.started = threading.Event()
        if not self.working:
            return
        # Read here: the thread may be slow, and training then already writes new events.
        events = read_past_events(directory)
        self.thread = threading.Thread(target=self._work, args=(options, events), daemon=True)
        self.thread.start()
        self.started.wait(START_SECONDS)

    def log(self, values: dict[str, Any]) -> None:
        """Queue the metrics of the training step values["step"] for wandb.

        Steps must not decrease.
        """
        if not self.working:
            return
        # Many lines may wait while earlier ones are sent, or after a long log_interval.
        stalled = time.monotonic() - self.taken_at > STALL_SECONDS
        if stalled and self.lines.qsize() >= BACKLOG:
            self._give_up(f"{BACKLOG} lines are still queued")
            abandon_service()
        else:
            self.lines.put(values)

    def add_event(self, event: Event) -> None:
        """Queue an event of the run, which may cause an alert; may be called in any thread."""
        if self.working:
            self.lines.put(event)

    def finish(self, summary: dict[str, Any] | None = None, exit_code: int = 0) -> None:
        """Send all queued metrics and finish the wandb run.

        Give up if wandb takes no line for FINISH_SECONDS.

        Args:
            summary: values to add to the summary of the wandb run; None adds no values.
            exit_code: 0 if training succeeded; wandb marks the run as failed for other values.
        """
        if not self.working:
            return
        self.training = False
        self.summary, self.exit_code = summary or {}, exit_code
        self.lines.put(None)
        self.taken_at = time.monotonic()
        # The thread may still send the earlier steps of a long run.
        while self.thread.is_alive() and time.monotonic() < self.taken_at + FINISH_SECONDS:
            self.thread.join(1)
        if self.thread.is_alive():
            self._give_up(f"wandb did not finish within {FINISH_SECONDS} s")
            abandon_service()
        self.working = False

    def _work(self, options: dict[str, Any], past_events: Sequence[Event]) -> None:
        try:
            place = Path(options["dir"])
            uploaded = set_aside(place, self.id)
            was_online = self.was_online or has_online(place, self.id)
            # Offline, the last step on the server is unknown: a new wandb run gets all lines.
            offline_id = new_id() if was_online else self.id
            run = start(self.mode, options, offline_id)
            self.id = offline_id if run.offline else run.id
            self.started.set()
            sent = uploaded
            if not run.offline:
                sent = run.step - 1
            elif was_online:
                sent = -1
            for values in self.history:
                if values["step"] > sent:
                    log_step(run, values)
                    self.taken_at = time.monotonic()
            events = SentEvents(run, self.directory, self.alert_kinds, past_events)
            self._send(run, events, sent)
            run.summary.update(self.summary)
            events.update_table(end=True)
            run.finish(exit_code=self.exit_code)
            if failure := failed_upload(Path(run.dir).parent):
                reason = refusal_text(ConnectionError(failure))
                self._give_up(f"the server has not stored all steps: {reason}")
        except Exception as error:
            tear_down()  # before the message, after which `finish` may return and the process exit
            self._give_up(repr(error))
        finally:
            self.started.set()

    def _send(self, run: Any, events: SentEvents, sent: int) -> None:
        """Send queued lines of steps after `sent`, and queued events, until `finish`."""
        tag = CancelTag(run, self.on_cancel) if self.on_cancel else None
        while True:
            item: dict[str, Any] | Event | None = {}
            with contextlib.suppress(queue.Empty):
                item = self.lines.get(timeout=POLL_SECONDS)
            if item is None:
                return
            if isinstance(item, Event):
                events.add(item)
            elif item and item["step"] > sent:  # {} if no line came
                log_step(run, item)
            events.update_table()
            if tag:
                tag.check()
            self.taken_at = time.monotonic()

    def _give_up(self, why: str) -> None:
        if not self.working:
            return
        self.working = False
        if self.training:
            to_stderr(
                f"wandb stopped working, training continues: {why}; "
                "later, `diffllm wandb` writes all steps"
            )
        else:
            to_stderr(
                f"wandb stopped working after training: {why}; `diffllm wandb` writes all steps"
            )
