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
from typing import Any

import numpy as np

from diffllm.core.typed import made

SUM_OF_WEIGHTS = 10**9
LEAST_WEIGHT = 1e-4
"""Sources with a smaller share are not read."""
SHORTEST_BLOCK, LONGEST_BLOCK = 64, 65_536
RAREST_SAMPLES = 8
"""Minimum samples per block of the rarest source, for each other source."""
SAMPLE_LIMIT = 2**53


@dataclass(frozen=True)
class Segment:
    start: int
    weights: tuple[int, ...]
    """One weight per source, relative to the sum of weights."""
    before: tuple[int, ...]

    @property
    def block(self) -> int:
        rarest = min(weight for weight in self.weights if weight)
        other_sources = len(self.weights) - 1
        size = RAREST_SAMPLES * other_sources * sum(self.weights) // rarest
        power_of_two = 1 << size.bit_length()
        return min(max(power_of_two, SHORTEST_BLOCK), LONGEST_BLOCK)

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
        counts = tuple(before)
        if not counts:
            _, first_weights = segments[0]
            counts = (0,) * len(first_weights)
        for i, (start, weights) in enumerate(segments):
            # A segment begins with the counts at the end of the previous segment.
            if i:
                previous = self.segments[-1]
                counts = previous.counts(start - previous.start)
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
            place = sample - start
            source = int(order[place])
            sources[i] = source
            numbers[i] = before[source] + int(ranks[place])
        return sources, numbers

    def counts(self, samples: int) -> list[int]:
        start, (order, _), before = self._at(samples)
        begun_block = order[: samples - start]
        in_block = np.bincount(begun_block, minlength=len(before))
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
            samples_of_source = int(max(remaining, 0))
            place = segment.start + samples_of_source * sum(segment.weights) // weight
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
        ends = segment.counts(after)
        # Only these counts determine a block, so blocks with equal counts share an entry of the
        # cache.
        counts = tuple(end - start for start, end in zip(before, ends, strict=True))
        return segment.start + first, block_of(counts), before


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
    remainders = [samples * weight % total for weight in weights]
    # The sort is stable: of sources with equal remainders, the first gets the sample.
    by_remainder = sorted(range(len(weights)), key=lambda k: -remainders[k])
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
    used_sources = [k for k, count in enumerate(counts) if count]
    # A source alone has K = 1, for which 2K - 2 would be 0.
    parts = max(2 * len(used_sources) - 2, 1)

    def first_position(count: int, n: int, part: int) -> int:
        # The first position p at which count * p / size - n is at least part / parts.
        numerator = size * (parts * n + part)
        return -(-numerator // (parts * count))

    # A queue contains (position, source k, number n of the sample in its source). `waiting` is
    # ordered by the earliest position of a sample, `ready` by the latest position. Each source has
    # one sample in a queue: the next sample waits only after this one has a position.
    waiting: list[tuple[int, int, int]] = []
    ready: list[tuple[int, int, int]] = []
    for k in used_sources:
        earliest = first_position(counts[k], 0, 1)
        heapq.heappush(waiting, (earliest, k, 0))
    order = np.empty(size, np.int16)
    for place in range(1, size + 1):
        while waiting and waiting[0][0] <= place:
            _, k, n = heapq.heappop(waiting)
            latest = first_position(counts[k], n, parts - 1)
            heapq.heappush(ready, (latest, k, n))
        _, k, n = heapq.heappop(ready)
        order[place - 1] = k
        next_number = n + 1
        if next_number < counts[k]:
            earliest = first_position(counts[k], next_number, 1)
            heapq.heappush(waiting, (earliest, k, next_number))
    return order


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
        check_sample_counts([self.sample, self.since])
        check_sample_counts([*self.consumed.values(), *self.before.values()])
        # The order of the names is compared too, because weights has one share per name in order.
        has_same_names = list(self.before) == list(self.consumed)
        has_right_sample = sum(self.consumed.values()) == self.sample
        has_right_since = sum(self.before.values()) == self.since
        if not (has_same_names and has_right_sample and has_right_since):
            raise ValueError(
                "consumed must add up to sample, and before, by the same names, to since"
            )
        for row in self.weights:
            # An empty row has no shares, so it is refused before its start is read.
            shares = row[1:]
            has_all_shares = len(shares) == len(self.consumed)
            is_valid = has_all_shares and abs(sum(shares) - 1) < 1e-6
            if not is_valid or row[0] != int(row[0]):
                raise ValueError(f"weights has {row}; must be a start and one share per source")
            in_parts(shares)
        starts = [int(row[0]) for row in self.weights]
        check_sample_counts(starts)
        is_ascending = sorted(starts) == starts
        begins_late = bool(starts) and starts[0] > self.since
        if not is_ascending or begins_late or self.since > self.sample:
            raise ValueError("starts in weights must ascend; first start <= since <= sample")


def check_sample_counts(counts: list[int]) -> None:
    least = min(counts, default=0)
    most = max(counts, default=0)
    if not 0 <= least <= most < SAMPLE_LIMIT:
        raise ValueError(f"sample counts must be from 0 to {SAMPLE_LIMIT - 1}")


def check_place(state: Any) -> None:
    """Raise ValueError if `state`, a saved data position, is invalid; an empty dict is valid."""
    if isinstance(state, dict) and "consumed" in state:
        made(MixturePlace, state).check()
    elif state != {}:
        place = made(EpochPlace, state)
        check_sample_counts([place.epoch, place.sample])
