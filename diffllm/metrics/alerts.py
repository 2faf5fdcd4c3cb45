"""Alerts of wandb (mail, Slack) about events of a run, at most one per kind and hour."""

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from diffllm.core.errors import ConfigError
from diffllm.metrics.events import Event

LEVELS = {"diverged": "ERROR", "skipped": "WARN", "loss_spike": "WARN", "stall": "ERROR"}
"""Kinds of events that cause alerts, with the level of the alert in wandb."""
TITLES = {
    "diverged": "Training diverged", "skipped": "Updates skipped", "loss_spike": "Loss spike",
    "stall": "Training stalled",
}  # fmt: skip
INTERVAL_S = 3600
"""Seconds between two alerts of one kind."""
SKIPS = 10
"""Skipped updates in a row that cause an alert, half of train.max_consecutive_skips by default."""
QUIET_STEPS = 1000
"""A loss spike causes an alert if the previous loss spike is at least this many steps earlier."""


def check_alerts(kinds: Iterable[str]) -> None:
    """Raise ConfigError if a value of wandb.alerts is unknown."""
    for kind in kinds:
        if kind not in LEVELS:
            raise ConfigError(f"wandb.alerts: {kind!r} must be one of {', '.join(LEVELS)}")


class Alert(NamedTuple):
    """Arguments of `run.alert` in wandb."""

    title: str
    text: str
    level: str


class Alerts:
    """Selects the events of a run that cause alerts.

    Args:
        kinds: kinds of alerts, keys of LEVELS.
        past_events: events of earlier processes of the run, which cause no alert.
        clock: time in seconds.
    """

    def __init__(
        self,
        kinds: Iterable[str],
        past_events: Iterable[Event] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.kinds, self.clock = frozenset(kinds), clock
        self.sent_at: dict[str, float] = {}
        self.spike_step: int | None = None
        self.skip_step, self.skips = -1, 0
        # Past events only update the counts.
        for event in past_events:
            self._text(event)

    def select(self, event: Event) -> Alert | None:
        """Return the alert for the next event of the run, or None."""
        text = self._text(event)
        if not text or event.kind not in self.kinds:
            return None
        now = self.clock()
        sent_at = self.sent_at.get(event.kind)
        if sent_at is not None and now - sent_at < INTERVAL_S:
            return None
        self.sent_at[event.kind] = now
        return Alert(TITLES[event.kind], text, LEVELS[event.kind])

    def _text(self, event: Event) -> str:
        """Update the counts with `event`; return the text of its alert, or "" for no alert."""
        if event.kind in ("diverged", "stall"):
            return f"after step {event.step}: {event.detail}"
        if event.kind == "skipped":
            consecutive = event.step == self.skip_step + 1
            self.skip_step = event.step
            self.skips = self.skips + 1 if consecutive else 1
            if self.skips >= SKIPS:
                return (
                    f"{self.skips} updates in a row were skipped up to step {event.step}, "
                    f"{loss_text(event)}"
                )
        if event.kind == "loss_spike":
            # A drop of the loss is a spike by the definition of OLMo 2.
            if event.height is not None and event.height < 0:
                return ""
            last_step, self.spike_step = self.spike_step, event.step
            if last_step is None or event.step - last_step >= QUIET_STEPS:
                return f"step {event.step}: {loss_text(event)} is a spike ({event.definition})"
        return ""


def loss_text(event: Event) -> str:
    """Return the loss of an event as text; a null of events.jsonl means NaN or infinity."""
    if event.value is None or not math.isfinite(event.value):
        return "loss not finite"
    return f"loss {event.value:.4g}"
