"""Spikes planted into the losses and gradient norms of real runs, and the share that is found.

The series are those of tests/data_files/spikes_*.csv, whose first lines say the commands. They hold
no loss spike that anyone planted; docs/spikes.md has the rates.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from diffllm.metrics.spikes import EventCounter, SpikeCounter, olmo2, window128

FILES = Path(__file__).parent / "data_files"
SHAPES = {"one step": [1.0], "8 steps": (0.7 ** np.arange(8)).tolist()}
"""Shares of a spike's height, step by step: gone at once, or three tenths smaller every step."""
SEEN_WITHIN = 6
"""Steps from a spike's first on in which it counts as found."""

Counter = SpikeCounter | EventCounter
DEFINITIONS: dict[str, tuple[Callable[[], Counter], Callable[[], Counter]]] = {
    "detrended": (EventCounter, lambda: EventCounter(log=True)),
    "128 steps": (window128, window128),
    "OLMo 2": (olmo2, olmo2),
}
"""Counters of spikes of a loss and of a gradient norm, by the name that docs/spikes.md has."""


def series(run: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a run, one a step."""
    loss, norm = np.loadtxt(FILES / f"spikes_{run}.csv", delimiter=",", skiprows=2, unpack=True)
    return loss.tolist(), norm.tolist()


def found(
    make: Callable[[], Counter],
    values: Sequence[float],
    plant: Callable[[float, float], float],
    shape: Sequence[float],
    steps: Sequence[int],
) -> list[bool]:
    """Whether a spike that begins at a step (from 0) is found, for each of `steps`, rising.

    Args:
        plant: gives a planted value from the real one and a share of the spike's height.
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
    """Plant a spike of so many nats."""
    return lambda loss, share: loss + nats * share


def times(factor: float) -> Callable[[float, float], float]:
    """Plant a spike of a gradient norm that is so many times as large."""
    return lambda norm, share: norm * factor**share


def events_in(make: Callable[[], EventCounter], values: Sequence[float]) -> tuple[int, int]:
    """The events of a series, and the steps that could be judged."""
    counter = make()
    for value in values:
        counter.update(value)
    return counter.total, counter.judged


def false_alarms(law: str, runs: int, steps: int = 2000, seed: int = 0) -> float:
    """Events in a thousand judged steps of noise alone, runs of `steps` values of one law.

    Args:
        law: "normal"; "t(5)", whose tails are heavier; "log-normal", counted as a gradient norm is;
            "descent", normal noise of a tenth of a nat around a loss that falls from 9 to 3.
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
