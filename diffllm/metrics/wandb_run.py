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
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffllm.core.names import directory_name, shortened
from diffllm.core.printing import to_stderr
from diffllm.metrics.events import Event
from diffllm.metrics.wandb_config import LONGEST_NAME, WandbConfig, resolve_mode
from diffllm.metrics.wandb_directories import has_online, set_aside, wandb_parent
from diffllm.metrics.wandb_events import CancelTag, SentEvents, read_past_events
from diffllm.metrics.wandb_start import (
    abandon_service,
    failed_upload,
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
            # Before `start`, which creates the directory of this start.
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
            failure = failed_upload(Path(run.dir).parent)
            if failure:
                reason = refusal_text(ConnectionError(failure))
                self._give_up(f"the server has not stored all steps: {reason}")
        except Exception as error:
            # Before the message, after which `finish` may return and the process may exit.
            tear_down()
            self._give_up(repr(error))
        finally:
            # The constructor waits for this event, also after a failure.
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

    def _give_up(self, reason: str) -> None:
        if not self.working:
            return
        self.working = False
        if self.training:
            to_stderr(
                f"wandb stopped working, training continues: {reason}; "
                "later, `diffllm wandb` writes all steps"
            )
        else:
            to_stderr(
                f"wandb stopped working after training: {reason}; `diffllm wandb` writes all steps"
            )
