"""From weights by tokens to segments of constant weights, the steps of a mixture's order."""

from collections.abc import Sequence
from itertools import pairwise

from diffllm.core.errors import ConfigError
from diffllm.data.config import Between, DataConfig
from diffllm.data.mixture.order import LEAST_WEIGHT, SHORTEST, MixtureOrder

STAIRS = 256
"""Most steps that a slope of weights is made of."""
Segments = list[tuple[int, tuple[float, ...]]]
"""First samples and the weights from there on, one a source."""


def weights_at_start(cfg: DataConfig) -> tuple[float, ...]:
    """The weights of the sources, in their order, as shares of 1."""
    return shares([source.weight for source in cfg.sources.values()])


def segments(cfg: DataConfig, samples: int, seq_len: int) -> Segments:
    """The segments of a run.

    A slope is made of at most 256 steps, each with the weights of its middle; those below the least
    weight are 0 there.

    Args:
        samples: of the whole run.
        seq_len: tokens of a sample.
    """
    points: Segments = [(0, weights_at_start(cfg))]
    for point in cfg.curriculum:
        place = round(point.at * samples) if point.at <= 1 else round(point.at / seq_len)
        weights = [point.weights.get(name, 0.0) for name in cfg.sources]
        points.append((max(place, points[-1][0]), shares(weights)))
    if cfg.between is Between.constant:
        return points
    found: Segments = []
    for (start, first), (stop, last) in pairwise(points):
        steps = min(STAIRS, max(1, (stop - start) // SHORTEST))
        for i in range(steps):
            at = (2 * i + 1) / (2 * steps)
            between = [a + at * (b - a) for a, b in zip(first, last, strict=True)]
            found.append((start + i * (stop - start) // steps, shares(between)))
    return [*found, points[-1]]


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights over their sum; 0 for one below the least that is read at all."""
    total = sum(weights)
    kept = [weight if weight >= LEAST_WEIGHT * total else 0.0 for weight in weights]
    return tuple(weight / sum(kept) for weight in kept)


def limited(
    plan: Segments, first: int, last: int, before: Sequence[int], most: Sequence[float]
) -> Segments:
    """The segments from sample `first` on, in which a source that has been read as often as it may
    leaves its weight to the others.

    Args:
        last: the run's end; what would happen behind it does not count.
        before: samples of each source before `first`.
        most: samples that each source may have in all; infinite for no limit.

    Raises ConfigError where no source is left.
    """
    plan = from_sample(plan, first)
    spent: set[int] = set()
    while True:
        order = MixtureOrder(plan, before)
        ends = {k: order.reaches(k, most[k]) for k in range(len(most)) if k not in spent}
        reached = {k: end for k, end in ends.items() if end is not None and end < last}
        if not reached:
            return plan
        end = min(reached.values())
        spent |= {k for k, place in reached.items() if place == end}
        later = []
        for start, weights in from_sample(plan, end):
            left = [0.0 if k in spent else weight for k, weight in enumerate(weights)]
            if not any(left):
                raise ConfigError(
                    f"data.sources: after {end:,} samples no source with a weight is left that "
                    "epochs_at_most lets be read again"
                )
            later.append((start, shares(left)))
        plan = [segment for segment in plan if segment[0] < end] + later


def from_sample(plan: Segments, first: int) -> Segments:
    """The segments from a sample on, the one that it lies in cut."""
    past = [weights for start, weights in plan if start <= first]
    return [(first, past[-1]), *(segment for segment in plan if segment[0] > first)]
