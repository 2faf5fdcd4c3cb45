"""Choose the source of each sample in a mixture, for weights that may change during a run.

A run is divided into segments with constant weights, and each segment into blocks of samples. At
each block boundary, the sources have provided samples of the segment in proportion to the weights,
rounded by largest remainders. Within a block, the sources alternate evenly by the algorithm of
R. Tijdeman ("The chairman assignment problem", Discrete Mathematics 32, 1980). Let a source provide
the fraction w of the samples of a block with K > 1 sources. Then the number of samples from this
source among the first n samples of the block differs from w * n by at most 1 - 1/(2K - 2).

Only integer arithmetic is used, so the order is equal on every platform.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from diffllm.core.errors import ConfigError
from diffllm.core.typed import made
from diffllm.data.config import Between, DataConfig

Segments = list[tuple[int, tuple[float, ...]]]
"""First sample of each segment, with one weight per source."""
SUM_OF_WEIGHTS = 10**9
LEAST_WEIGHT = 1e-4
"""Sources with a smaller share are not read."""
SHORTEST_BLOCK, LONGEST_BLOCK = 64, 65_536
RAREST_SAMPLES = 8
"""Minimum samples per block of the rarest source, for each other source."""
MOST_STEPS = 256
"""Maximum segments between two points of a linear curriculum."""
MOST_SAMPLES = 2**53


@dataclass(frozen=True)
class Segment:
    start: int
    weights: tuple[int, ...]
    """One weight per source, relative to the sum of weights."""
    before: tuple[int, ...]

    @property
    def block(self) -> int:
        rarest = min(weight for weight in self.weights if weight)
        size = RAREST_SAMPLES * (len(self.weights) - 1) * sum(self.weights) // rarest
        return min(max(1 << size.bit_length(), SHORTEST_BLOCK), LONGEST_BLOCK)

    def counts(self, samples: int) -> tuple[int, ...]:
        """Return how many samples each source has provided up to a position in this segment.

        The position is given by `samples`, the number of samples since the start of the segment.
        The returned numbers include the samples of all earlier segments.
        """
        shares = shared_out(samples, self.weights)
        return tuple(a + b for a, b in zip(self.before, shares, strict=True))


class MixtureOrder:
    """Maps the index of a sample in a mixture to the source that provides the sample.

    Args:
        segments: pairs (index of the first sample, weights of the sources), in ascending order.
        before: number of samples per source before the first segment; () means 0 for each source.
    """

    def __init__(
        self, segments: Sequence[tuple[int, Sequence[float]]], before: Sequence[int] = ()
    ) -> None:
        self.segments: list[Segment] = []
        counts = tuple(before) or (0,) * len(segments[0][1])
        for i, (start, weights) in enumerate(segments):
            # A segment begins with the counts at the end of the previous segment.
            if i:
                counts = self.segments[-1].counts(start - self.segments[-1].start)
            self.segments.append(Segment(start, in_parts(weights), counts))
        self._starts = [segment.start for segment in self.segments]

    def places(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source index of each sample, and the sample's index within its source.

        `samples` (n,) contains the indices of the samples in the mixture. Returns two arrays (n,).
        """
        sources = np.empty_like(samples)
        numbers = np.empty_like(samples)
        for i, sample in enumerate(samples.tolist()):
            start, (order, ranks), before = self._at(sample)
            source = int(order[sample - start])
            sources[i] = source
            numbers[i] = before[source] + int(ranks[sample - start])
        return sources, numbers

    def counts(self, samples: int) -> list[int]:
        start, (order, _), before = self._at(samples)
        in_block = np.bincount(order[: samples - start], minlength=len(before))
        return (in_block + before).tolist()

    def reaches(self, source: int, most: float) -> int | None:
        """Return the number of mixture samples after which `source` has provided `most` samples.

        The number is computed from the weights and rounded down, so it may differ slightly from the
        number in the exact order. Return None if the source never provides `most` samples.
        """
        ends = [*self._starts[1:], math.inf]
        for segment, end in zip(self.segments, ends, strict=True):
            weight = segment.weights[source]
            remaining = most - segment.before[source]
            if not weight or remaining == math.inf:
                continue
            place = segment.start + int(max(remaining, 0)) * sum(segment.weights) // weight
            if place < end:
                return place
        return None

    def _at(self, sample: int) -> tuple[int, tuple[np.ndarray, np.ndarray], tuple[int, ...]]:
        """Find the block of samples that contains sample number `sample`.

        Returns the number of the block's first sample, the pair of arrays that `block_of` returns
        for this block, and the number of samples of each source before the block.
        """
        number = bisect_right(self._starts, sample) - 1
        segment = self.segments[number]
        size = segment.block
        first = (sample - segment.start) // size * size
        after = first + size
        # A block never extends into the next segment, whose weights differ.
        if number + 1 < len(self.segments):
            after = min(after, self._starts[number + 1] - segment.start)
        before = segment.counts(first)
        content = tuple(b - a for a, b in zip(before, segment.counts(after), strict=True))
        return segment.start + first, block_of(content), before


# Cached, because consecutive samples are usually in the same block.
@lru_cache(maxsize=8)
def block_of(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Order the samples of a block, which contains `counts[k]` samples of source k.

    Returns two arrays (sum(counts),): the source index of each sample, and the number of earlier
    samples in the block from the same source.
    """
    order = laid_out(counts)
    ranks = np.empty(len(order), np.int64)
    for source, count in enumerate(counts):
        ranks[order == source] = np.arange(count)
    return order, ranks


def in_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Scale weights to a sum of 10**9, and round each weight to an integer.

    Raises ValueError if a weight is negative, if all weights are 0, or if a positive weight is less
    than LEAST_WEIGHT times the sum.
    """
    # Fractions are exact, so the result is equal on every platform and Python version.
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    if min(exact) < 0 or not total:
        raise ValueError(f"weights={list(weights)} must be at least 0, and one above 0")
    for weight in exact:
        if 0 < weight < Fraction(LEAST_WEIGHT) * total:
            raise ValueError(
                f"a weight is {float(weight / total):.2g} of the sum; must be 0 or at least "
                f"{LEAST_WEIGHT:g}"
            )
    return tuple(round(weight * SUM_OF_WEIGHTS / total) for weight in exact)


def shared_out(samples: int, weights: Sequence[int]) -> list[int]:
    """Divide a number of samples among sources in proportion to `weights` (largest remainders)."""
    total = sum(weights)
    shares = [samples * weight // total for weight in weights]
    missing = samples - sum(shares)
    # The sort is stable: of sources with equal remainders, the first gets the sample.
    by_remainder = sorted(range(len(weights)), key=lambda k: -(samples * weights[k] % total))
    for k in by_remainder[:missing]:
        shares[k] += 1
    return shares


def laid_out(counts: Sequence[int]) -> np.ndarray:
    """Choose a source for each position of a block, evenly mixed by Tijdeman's algorithm.

    The block contains `counts[k]` samples of source k. Returns the source index at each position,
    (sum(counts),) int16.

    Let the block contain K > 1 sources, and let a source provide the fraction w of the block.
    Positions p count from 1. The earliest position of the n-th sample of this source (n >= 1) is
    the first p with w * p - (n - 1) >= 1 / (2K - 2). The latest position of this sample is the
    first p with w * p - (n - 1) >= 1 - 1 / (2K - 2). The positions are filled in ascending order:
    of the unused samples with earliest position <= p, position p gets the sample with the smallest
    latest position.
    """
    size = sum(counts)
    used = [k for k, count in enumerate(counts) if count]
    parts = max(2 * len(used) - 2, 1)

    def first_position(count: int, n: int, part: int) -> int:
        # The first position p at which count * p / size - n is at least part / parts.
        return -(-size * (parts * n + part) // (parts * count))

    # `waiting` is ordered by the earliest position of a sample, `ready` by the latest position.
    waiting = [(first_position(counts[k], 0, 1), k, 0) for k in used]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    order = np.empty(size, np.int16)
    for place in range(1, size + 1):
        while waiting and waiting[0][0] <= place:
            _, k, n = heapq.heappop(waiting)
            heapq.heappush(ready, (first_position(counts[k], n, parts - 1), k, n))
        _, k, n = heapq.heappop(ready)
        order[place - 1] = k
        if n + 1 < counts[k]:
            heapq.heappush(waiting, (first_position(counts[k], n + 1, 1), k, n + 1))
    return order


def segments(cfg: DataConfig, samples: int, seq_len: int) -> Segments:
    """Divide a run of `samples` samples of `seq_len` tokens into segments with constant weights.

    Returns one pair per segment: (index of the first sample, weights of the sources). With
    data.between=linear, at most 256 segments lie between two points of the curriculum. Each of
    these segments uses the weights interpolated at its midpoint.
    """
    points: Segments = [(0, as_shares([source.weight for source in cfg.sources.values()]))]
    for point in cfg.curriculum:
        place = round(point.at * samples) if point.at <= 1 else round(point.at / seq_len)
        weights = [point.weights.get(name, 0.0) for name in cfg.sources]
        # A share of tokens and a number of tokens can be in the wrong order for a short run.
        points.append((max(place, points[-1][0]), as_shares(weights)))
    if cfg.between is Between.constant:
        return points
    plan: Segments = []
    for (start, first), (stop, last) in pairwise(points):
        steps = min(MOST_STEPS, max(1, (stop - start) // SHORTEST_BLOCK))
        for i in range(steps):
            midpoint = (2 * i + 1) / (2 * steps)
            weights = [a + midpoint * (b - a) for a, b in zip(first, last, strict=True)]
            plan.append((start + i * (stop - start) // steps, as_shares(weights)))
    plan.append(points[-1])
    return plan


def as_shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Set weights below LEAST_WEIGHT times the sum to 0, then scale all weights to a sum of 1."""
    total = sum(weights)
    # MixtureOrder refuses positive weights below this limit.
    used = [weight if weight >= LEAST_WEIGHT * total else 0.0 for weight in weights]
    return tuple(weight / sum(used) for weight in used)


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
    spent: set[int] = set()
    # Each round removes the sources that reach their maximum first. The other sources then get
    # larger weights, so their ends must be computed again.
    while True:
        order = MixtureOrder(plan, before)
        ends: dict[int, int] = {}
        for k in range(len(most)):
            source_end = None if k in spent else order.reaches(k, most[k])
            if source_end is not None and source_end < last:
                ends[k] = source_end
        if not ends:
            return plan
        end = min(ends.values())
        spent |= {k for k, source_end in ends.items() if source_end == end}
        later = []
        for start, weights in from_sample(plan, end):
            remaining = [0.0 if k in spent else weight for k, weight in enumerate(weights)]
            if not any(remaining):
                raise ConfigError(
                    f"data.sources: the run needs {last:,} samples, but no data is left after "
                    f"sample {end:,}, because all sources with a weight reach epochs_at_most; "
                    "increase epochs_at_most or shorten the run"
                )
            later.append((start, as_shares(remaining)))
        plan = [segment for segment in plan if segment[0] < end] + later


def from_sample(plan: Segments, first: int) -> Segments:
    past = [weights for start, weights in plan if start <= first]
    return [(first, past[-1]), *(segment for segment in plan if segment[0] > first)]


@dataclass(frozen=True)
class EpochPlace:
    seed: int
    epoch: int
    sample: int


@dataclass(frozen=True)
class MixturePlace:
    seed: int
    sample: int
    consumed: dict[str, int]
    since: int
    """First sample of the order by `weights`."""
    before: dict[str, int]
    """Samples per source before `since`."""
    weights: list[list[float]]
    """One row per segment: first sample (ascending), then the share of every source."""

    def check(self) -> None:
        check_sample_counts(
            [self.sample, self.since, *self.consumed.values(), *self.before.values()]
        )
        sums = sum(self.consumed.values()), sum(self.before.values())
        if [*self.before] != [*self.consumed] or sums != (self.sample, self.since):
            raise ValueError(
                "consumed must add up to sample, and before, by the same names, to since"
            )
        for row in self.weights:
            start, *shares = row or [0.5]  # 0.5 is an invalid start
            has_all_shares = len(shares) == len(self.consumed) and abs(sum(shares) - 1) < 1e-6
            if not (has_all_shares and start == int(start)):
                raise ValueError(f"weights has {row}; must be a start and one share per source")
            in_parts(shares)
        starts = [int(start) for start, *_ in self.weights]
        check_sample_counts(starts)
        if sorted(starts) != starts or starts[:1] > [self.since] or self.since > self.sample:
            raise ValueError("starts in weights must ascend; first start <= since <= sample")


def check_sample_counts(counts: list[int]) -> None:
    if not 0 <= min(counts, default=0) <= max(counts, default=0) < MOST_SAMPLES:
        raise ValueError(f"sample counts must be from 0 to {MOST_SAMPLES - 1}")


def check_place(state: Any) -> None:
    """Raise ValueError if `state`, a saved data position, is invalid; an empty dict is valid."""
    if isinstance(state, dict) and "consumed" in state:
        made(MixturePlace, state).check()
    elif state != {}:
        place = made(EpochPlace, state)
        check_sample_counts([place.epoch, place.sample])
