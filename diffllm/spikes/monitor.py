"""The spikes of a run: of loss and gradient norm, by every definition, and the skipped updates."""

import math
from typing import Any

from diffllm.spikes.events import EventCounter
from diffllm.spikes.published import SpikeCounter, olmo2, window128

SKIPS = ("skipped_total", "skipped_in_a_row", "longest_skip")
"""The counts of skipped updates that a checkpoint holds."""


class SpikeMonitor:
    """Spike counts of loss and gradient norm by three definitions, and of skipped updates."""

    def __init__(self) -> None:
        self.skipped_total = self.skipped_in_a_row = 0
        self.longest_skip = 0
        """Most skipped updates in a row since `forget_skips`."""
        self.counters = {
            f"{prefix}/{series}": make()
            for prefix, make in (("spikes", window128), ("spikes_olmo2", olmo2))
            for series in ("loss", "grad")
        }
        self.events = {
            "spikes_detrended/loss": EventCounter(),
            "spikes_detrended/grad": EventCounter(log=True),
        }

    @property
    def all_counters(self) -> dict[str, SpikeCounter | EventCounter]:
        """Every counter, by definition and series."""
        return {**self.counters, **self.events}

    def update(self, loss: float, grad_norm: float, skipped: bool = False) -> None:
        """Take one optimizer step's values, in order of steps."""
        self.skipped_total += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.longest_skip = max(self.longest_skip, self.skipped_in_a_row)
        for name, counter in self.all_counters.items():
            counter.update(loss if name.endswith("/loss") else grad_norm)

    def forget_skips(self) -> None:
        """Count skips in a row from here on."""
        self.skipped_in_a_row = self.longest_skip = 0

    def metrics(self) -> dict[str, float]:
        """Return `<definition>/{loss,grad}_{total,score,judged}`, rolling totals and scores of the
        published definitions, and `spikes/skipped_total`.

        Totals and scores are of the run so far; rolling ones of the definition's window.
        """
        counts = {
            f"{name}_{what}": value
            for name, counter in self.all_counters.items()
            for what, value in counter.metrics().items()
        }
        return {**counts, "spikes/skipped_total": float(self.skipped_total)}

    def windows(self) -> tuple[list[float], list[float]]:
        """Return the losses and gradient norms that window128 judges the next step by."""
        return list(self.counters["spikes/loss"].values), list(self.counters["spikes/grad"].values)

    def recent_loss(self, count: int) -> float:
        """Return the mean of the last `count` finite losses."""
        losses = list(self.counters["spikes/loss"].values)[-count:]
        return sum(losses) / len(losses) if losses else math.nan

    def state_dict(self) -> dict[str, Any]:
        counters = {name: counter.state_dict() for name, counter in self.all_counters.items()}
        return {**counters, **{name: getattr(self, name) for name in SKIPS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, counter in self.counters.items():
            counter.load_state_dict(state[name])
        for name, events in self.events.items():
            if name in state:  # older checkpoints have none: their events are counted from here
                events.load_state_dict(state[name])
        for name in SKIPS:
            setattr(self, name, state[name])
