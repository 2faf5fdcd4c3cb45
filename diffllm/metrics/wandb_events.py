"""Events of a run in wandb: alerts and a table; and the tag in wandb that stops a run."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diffllm.core.errors import CheckpointError
from diffllm.core.files import read_lines, readable
from diffllm.core.printing import to_stderr
from diffllm.core.run_files import RunFile
from diffllm.metrics.alerts import INTERVAL_S, Alerts
from diffllm.metrics.events import Event, parse_event, samples_text

MOST_ROWS = 1000
"""Maximum rows of the table, about 70 kB; each update uploads the whole table."""
EVENT_COLUMNS = tuple(Event.__dataclass_fields__)
TABLE_S = 3600
"""Seconds between two updates of the table during training."""
CANCEL_TAG = "cancel"
REQUEST_S = 60
"""Seconds between two requests for the tags of a run."""
TIMEOUT_S = 5
"""Maximum seconds of such a request; lines of metrics wait meanwhile."""


def newest_events(run: Path) -> tuple[list[Event], int]:
    """Return the newest events of a run, oldest first, and the number of older events.

    Invalid lines are ignored. Raises CheckpointError if the file cannot be read.
    """
    lines: deque[str] = deque(maxlen=MOST_ROWS)
    count = 0
    with readable(run / RunFile.EVENTS), contextlib.suppress(FileNotFoundError):
        for line in read_lines(run / RunFile.EVENTS):
            lines.append(line)
            count += 1
    events = []
    for line in lines:
        # A process is writing the line, or was killed.
        with contextlib.suppress(ValueError):
            events.append(parse_event(line))
    return events, count - len(lines)


def read_past_events(run: Path) -> list[Event]:
    """Return the newest events of a run, oldest first; [] if the file is missing or unreadable."""
    with contextlib.suppress(CheckpointError):
        return newest_events(run)[0]
    return []


def events_summary(run: Path) -> dict[str, Any]:
    """Return the table of a run's newest events as values of a wandb summary; {} without events.

    "events" is the table, with the columns EVENT_COLUMNS; "events_omitted" is the number of older
    events. Raises CheckpointError as `newest_events`.
    """
    events, omitted = newest_events(run)
    if not events:
        return {}
    import wandb

    table = wandb.Table(columns=list(EVENT_COLUMNS), allow_mixed_types=True)
    for event in events:
        row = asdict(event) | {"batch": samples_text(event)}
        table.add_data(*row.values())
    return {"events": table, "events_omitted": omitted}


class SentEvents:
    """Sends events of a run to the open wandb run `run`, as alerts and as a table in its summary.

    Offline, no alert is sent: `wandb sync` would send old alerts.

    Args:
        directory: run directory.
        alerts: kinds of alerts, as in wandb.alerts.
        past_events: events of earlier processes, read before this process writes events of steps.
        clock: time in seconds.
    """

    def __init__(
        self,
        run: Any,
        directory: Path,
        alerts: Iterable[str],
        past_events: Sequence[Event],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run, self.directory, self.clock = run, directory, clock
        self.alerts = Alerts(() if run.offline else alerts, past_events, clock)
        self.changed = bool(past_events)
        self.table_at = -math.inf

    def add(self, event: Event) -> None:
        self.changed = True
        alert = self.alerts.select(event)
        if alert:
            # wandb's server applies the interval, too: a restarted process does not know it.
            self.run.alert(*alert, wait_duration=INTERVAL_S)

    def update_table(self, end: bool = False) -> None:
        """Send the table of events if it is due, or if `end` is set.

        The table is due after a new event, at most once per TABLE_S seconds. A failure is printed.
        """
        now = self.clock()
        if not end and (not self.changed or now - self.table_at < TABLE_S):
            return
        self.changed, self.table_at = False, now
        try:
            summary = events_summary(self.directory)
            if summary:
                self.run.summary.update(summary)
        except Exception as error:
            # Lines of metrics may still work.
            to_stderr(f"warning: wandb lacks the table of the newest events: {error!r}")


class CancelTag:
    """Calls `on_cancel` once if the run has the tag CANCEL_TAG in wandb.

    Args:
        run: the open wandb run; a warning is printed if it is offline, as after a refusal.
        clock: time in seconds.
    """

    def __init__(
        self,
        run: Any,
        on_cancel: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run, self.on_cancel, self.clock = run, on_cancel, clock
        self.active = not run.offline
        if run.offline:
            to_stderr("warning: wandb.cancel_tag has no effect, because the run is offline")
        self.requested_at = -math.inf
        self.api: Any = None
        self.remote: Any = None

    def check(self) -> None:
        """Request the tags of the run if the last request is REQUEST_S seconds old.

        A failed request is ignored.
        """
        now = self.clock()
        if not self.active or now - self.requested_at < REQUEST_S:
            return
        self.requested_at = now
        tags: list[str] = []
        # The next request may succeed, and the run needs no tags.
        with contextlib.suppress(Exception):
            tags = self._tags()
        if CANCEL_TAG in tags:
            self.active = False
            self.on_cancel()

    def _tags(self) -> list[str]:
        import wandb

        if self.api is None:
            # Without both overrides, `Api.run` also requests the default entity. The constructor
            # sends a request, so the first request for tags is due at the next call.
            place = {"entity": self.run.entity, "project": self.run.project}
            self.api = wandb.Api(place, timeout=TIMEOUT_S)
            return []
        if self.remote is None:
            self.remote = self.api.run(self.run.id)
        else:
            self.remote.load(force=True)
        return list(self.remote.tags)
