"""Plan of a mixture: segments of a run with constant weights.

The plan follows from the weights of the sources, the curriculum and the limits of epochs.
"""

from collections.abc import Sequence
from itertools import pairwise

from diffllm.core.errors import ConfigError
from diffllm.data.config import DataConfig
from diffllm.data.curriculum import Between
from diffllm.data.mixture_order import LEAST_WEIGHT, SHORTEST_BLOCK, MixtureOrder

Segments = list[tuple[int, tuple[float, ...]]]
"""First sample of each segment, with one weight per source."""
MOST_SEGMENTS = 256
"""Maximum segments between two points of a linear curriculum."""


def segments(cfg: DataConfig, samples: int, seq_len: int) -> Segments:
    """Divide a run of `samples` samples of `seq_len` tokens into segments with constant weights.

    Returns one pair per segment: (index of the first sample, weights of the sources). With
    data.between=linear, at most 256 segments lie between two points of the curriculum. Each of
    these segments uses the weights interpolated at its midpoint.
    """
    initial_weights = [source.weight for source in cfg.sources.values()]
    points: Segments = [(0, as_shares(initial_weights))]
    for point in cfg.curriculum:
        place = round(point.at * samples) if point.at <= 1 else round(point.at / seq_len)
        # A share of tokens and a number of tokens can be in the wrong order for a short run.
        previous_place, _ = points[-1]
        place = max(place, previous_place)
        weights = [point.weights.get(name, 0.0) for name in cfg.sources]
        points.append((place, as_shares(weights)))
    if cfg.between is Between.constant:
        return points
    plan: Segments = []
    for (start, first_weights), (stop, last_weights) in pairwise(points):
        length = stop - start
        parts = min(MOST_SEGMENTS, max(1, length // SHORTEST_BLOCK))
        for i in range(parts):
            midpoint = (2 * i + 1) / (2 * parts)
            weights = []
            for first, last in zip(first_weights, last_weights, strict=True):
                weights.append(first + midpoint * (last - first))
            part_start = start + i * length // parts
            plan.append((part_start, as_shares(weights)))
    plan.append(points[-1])
    return plan


def as_shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Set weights below LEAST_WEIGHT times the sum to 0, then scale all weights to a sum of 1."""
    total = sum(weights)
    # MixtureOrder refuses positive weights below this limit.
    used_weights = []
    for weight in weights:
        is_used = weight >= LEAST_WEIGHT * total
        used_weights.append(weight if is_used else 0.0)
    total_of_used = sum(used_weights)
    return tuple(weight / total_of_used for weight in used_weights)


def limited(
    plan: Segments, first: int, last: int, before: Sequence[int], most: Sequence[float]
) -> Segments:
    """Return the segments of `plan` from sample `first` on, with a maximum of samples per source.

    A source that reaches its maximum gets weight 0; the other weights keep their ratios. Raises
    ConfigError if all sources with positive weight reach their maximum before the end of the run.

    Args:
        plan: pairs (first sample, weights of the sources) of the run.
        first: index of the sample at which the returned part starts.
        last: number of samples of the run.
        before: number of samples that each source provides before sample `first` of the run.
        most: maximum number of samples of each source, including `before`; inf for no maximum.
    """
    plan = from_sample(plan, first)
    spent_sources: set[int] = set()
    # Each round removes the sources that reach their maximum first. The other sources then get
    # larger weights, so their ends must be computed again.
    while True:
        order = MixtureOrder(plan, before)
        ends: dict[int, int] = {}
        for k, source_most in enumerate(most):
            if k in spent_sources:
                continue
            source_end = order.reaches(k, source_most)
            if source_end is not None and source_end < last:
                ends[k] = source_end
        if not ends:
            return plan
        end = min(ends.values())
        for k, source_end in ends.items():
            if source_end == end:
                spent_sources.add(k)
        later_segments = []
        for start, weights in from_sample(plan, end):
            remaining = list(weights)
            for k in spent_sources:
                remaining[k] = 0.0
            if not any(remaining):
                raise ConfigError(
                    f"data.sources: the run needs {last:,} samples, but no data is left after "
                    f"sample {end:,}, because all sources with a weight reach epochs_at_most; "
                    "increase epochs_at_most or shorten the run"
                )
            later_segments.append((start, as_shares(remaining)))
        earlier_segments = [segment for segment in plan if segment[0] < end]
        plan = earlier_segments + later_segments


def from_sample(plan: Segments, first: int) -> Segments:
    past_weights = [weights for start, weights in plan if start <= first]
    later_segments = [segment for segment in plan if segment[0] > first]
    # The segment that contains sample `first` now begins there.
    return [(first, past_weights[-1]), *later_segments]
