"""Spikes planted into losses and gradient norms of real runs, and the share of detected spikes.

The series are in tests/data_files/spikes_*.csv; the first lines of a file state the commands.
The files contain no planted spikes. docs/spikes.md lists the rates.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from diffllm.metrics.spikes import EventCounter, SpikeCounter, olmo2, window128

FILES = Path(__file__).parent / "data_files"
SHAPES = {"one step": [1.0], "8 steps": (0.7 ** np.arange(8)).tolist()}
"""Height of a spike at each step, relative to the first step: one step, or 0.7 per step."""
SEEN_WITHIN = 6
"""Number of steps, from the first step of a spike, in which a detection counts."""

Counter = SpikeCounter | EventCounter
DEFINITIONS: dict[str, tuple[Callable[[], Counter], Callable[[], Counter]]] = {
    "detrended": (EventCounter, lambda: EventCounter(log=True)),
    "128 steps": (window128, window128),
    "OLMo 2": (olmo2, olmo2),
}
"""Spike counters for losses and for gradient norms, by the name in docs/spikes.md."""


def series(run: str) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of a run, one value per step."""
    loss, norm = np.loadtxt(FILES / f"spikes_{run}.csv", delimiter=",", skiprows=2, unpack=True)
    return loss.tolist(), norm.tolist()


def found(
    make: Callable[[], Counter],
    values: Sequence[float],
    plant: Callable[[float, float], float],
    shape: Sequence[float],
    steps: Sequence[int],
) -> list[bool]:
    """Return whether a spike is detected that begins at a step, for each of `steps` (ascending).

    Args:
        plant: maps a real value and the relative height of the spike to the planted value.
    """
    counter, hits, at = make(), [], 0
    for step in steps:
        for value in values[at:step]:
            counter.update(value)
        at = step
        tried = copy.deepcopy(counter)
        shares = [*shape, *[0.0] * SEEN_WITHIN][:SEEN_WITHIN]
        planted = map(plant, values[step : step + SEEN_WITHIN], shares)
        hits.append(any(tried.update(value) for value in planted))
    return hits


def higher(nats: float) -> Callable[[float, float], float]:
    """Return a function that adds a loss spike of `nats`."""
    return lambda loss, share: loss + nats * share


def times(factor: float) -> Callable[[float, float], float]:
    """Return a function that multiplies a gradient norm by `factor` at the peak."""
    return lambda norm, share: norm * factor**share


def events_in(make: Callable[[], EventCounter], values: Sequence[float]) -> tuple[int, int]:
    """Return the number of events in a series, and the number of judged steps."""
    counter = make()
    for value in values:
        counter.update(value)
    return counter.total, counter.judged


def false_alarms(law: str, runs: int, steps: int = 2000, seed: int = 0) -> float:
    """Return events per thousand judged steps of pure noise, in `runs` series of `steps` values.

    Args:
        law: "normal"; "t(5)", with heavier tails; "log-normal", counted like a gradient norm;
            "descent", normal noise of 0.1 nats around a loss that falls from 9 to 3.
    """
    rng = np.random.default_rng(seed)
    total = judged = 0
    for _ in range(runs):
        noise = rng.standard_t(5, steps) if law == "t(5)" else rng.normal(0, 1, steps)
        values = {
            "log-normal": np.exp(0.3 * noise),
            "descent": 3 + 6 / np.sqrt(1 + np.arange(steps) / 20) + 0.1 * noise,
        }.get(law, noise)
        found = events_in(lambda: EventCounter(log=law == "log-normal"), values.tolist())
        total, judged = total + found[0], judged + found[1]
    return 1000 * total / judged
