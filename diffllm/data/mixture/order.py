"""The source of every sample of a mixture, by its number alone.

A run is cut into segments of constant weights, a segment into blocks. How many samples of each
source come before a block follows from its number: the weights times the samples, rounded to whole
samples by largest remainders. Within a block they are laid out evenly, by the algorithm of R.
Tijdeman ("The chairman assignment problem", Discrete Mathematics 32, 1980): with K sources, after
any number of samples the count of each is within 1 - 1/(2K - 2) of what its share says. So between
two samples of a source lie at most 2 / weight others. Integers only: equal on every platform.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

WHOLE = 10**9
"""Parts that weights are rounded to."""
LEAST_WEIGHT = 1e-4
"""The smallest share of a source that is read at all."""
SHORTEST, LONGEST = 64, 65_536
"""Samples of a block."""
ENOUGH = 8
"""Samples that a block has at least of the rarest source, times the number of the others."""


@dataclass(frozen=True)
class Segment:
    """A stretch of samples with constant weights."""

    start: int
    """Its first sample."""
    weights: tuple[int, ...]
    """One a source, in parts of their sum; 0 for one that is not read here."""
    before: tuple[int, ...]
    """Samples of each source that lie before it."""

    @property
    def block(self) -> int:
        """Samples of a block: a power of two."""
        rarest = min(weight for weight in self.weights if weight)
        wanted = ENOUGH * (len(self.weights) - 1) * sum(self.weights) // rarest
        return min(max(1 << wanted.bit_length(), SHORTEST), LONGEST)

    def counts(self, samples: int) -> tuple[int, ...]:
        """Count the samples of each source before sample start + `samples`, a block's first."""
        shares = shared_out(samples, self.weights)
        return tuple(a + b for a, b in zip(self.before, shares, strict=True))


class MixtureOrder:
    """The order of sources: a pure function of the number of a sample.

    Args:
        segments: starts, in rising order, and the weights from there on, one a source, in parts of
            their sum.
        before: samples of each source before the first segment; none unless given.
    """

    def __init__(
        self, segments: Sequence[tuple[int, Sequence[float]]], before: Sequence[int] = ()
    ) -> None:
        self.segments: list[Segment] = []
        counts = tuple(before) or (0,) * len(segments[0][1])
        for i, (start, weights) in enumerate(segments):
            if i:
                counts = self.segments[-1].counts(start - self.segments[-1].start)
            self.segments.append(Segment(start, in_parts(weights), counts))
        self._starts = [segment.start for segment in self.segments]

    def places(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample (n,), and its number among that source's samples."""
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        for i, sample in enumerate(samples.tolist()):
            start, (order, ranks), before = self._at(sample)
            source = int(order[sample - start])
            sources[i], numbers[i] = source, before[source] + int(ranks[sample - start])
        return sources, numbers

    def counts(self, samples: int) -> list[int]:
        """Count the samples of each source among the first `samples`."""
        start, (order, _), before = self._at(samples)
        here = np.bincount(order[: samples - start], minlength=len(before))
        return (here + before).tolist()

    def reaches(self, source: int, most: float) -> int | None:
        """Return a sample up to which there are at most so many of a source, and after which there
        would be more; None if there never are."""
        ends = [*self._starts[1:], math.inf]
        for segment, end in zip(self.segments, ends, strict=True):
            weight = segment.weights[source]
            left = most - segment.before[source]
            if not weight or left == math.inf:
                continue
            place = segment.start + int(max(left, 0)) * sum(segment.weights) // weight
            if place < end:
                return place
        return None

    def _at(self, sample: int) -> tuple[int, tuple[np.ndarray, np.ndarray], tuple[int, ...]]:
        """Return the first sample of the block that a sample lies in, the block, and the samples of
        each source before it."""
        number = bisect_right(self._starts, sample) - 1
        segment = self.segments[number]
        size = segment.block
        first = (sample - segment.start) // size * size
        after = first + size
        if number + 1 < len(self.segments):
            after = min(after, self._starts[number + 1] - segment.start)
        before = segment.counts(first)
        content = tuple(b - a for a, b in zip(before, segment.counts(after), strict=True))
        return segment.start + first, block_of(content), before


@lru_cache(maxsize=8)
def block_of(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Make a block with so many samples of each source: the source of each place, and its number
    among that source's samples of the block."""
    order = laid_out(counts)
    ranks = np.empty(len(order), np.int64)
    for source, count in enumerate(counts):
        ranks[order == source] = np.arange(count)
    return order, ranks


def in_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole parts of about `WHOLE`; raises ValueError for what no share can be."""
    exact = [Fraction(weight) for weight in weights]
    if min(exact) < 0 or not (total := sum(exact)):
        raise ValueError(f"weights={list(weights)} have to be 0 or more, and one above 0")
    for weight in exact:
        if 0 < weight < Fraction(LEAST_WEIGHT) * total:
            raise ValueError(
                f"a weight of {float(weight / total):.2g} of all is below {LEAST_WEIGHT:g}"
            )
    return tuple(round(weight * WHOLE / total) for weight in exact)


def shared_out(samples: int, weights: Sequence[int]) -> list[int]:
    """Share samples out by weights, by largest remainders; of equal ones, the first sources'."""
    whole = sum(weights)
    shares = [samples * weight // whole for weight in weights]
    left = samples - sum(shares)
    by_rest = sorted(range(len(weights)), key=lambda k: -(samples * weights[k] % whole))
    for k in by_rest[:left]:
        shares[k] += 1
    return shares


def laid_out(counts: Sequence[int]) -> np.ndarray:
    """Lay out so many samples of each source evenly: the source of each place, int16.

    The n-th of a source with share w may come once w places - (n - 1) is at least 1 / (2K - 2), and
    has to before it exceeds 1 - 1 / (2K - 2); of those that may, the most urgent comes.
    """
    size, used = sum(counts), [k for k, count in enumerate(counts) if count]
    parts = max(2 * len(used) - 2, 1)

    def first_place(count: int, n: int, part: int) -> int:
        """The first place at which count * place / size - n is at least part / parts."""
        return -(-size * (parts * n + part) // (parts * count))

    waiting = [(first_place(counts[k], 0, 1), k, 0) for k in used]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    order = np.empty(size, np.int16)
    for place in range(1, size + 1):
        while waiting and waiting[0][0] <= place:
            _, k, n = heapq.heappop(waiting)
            heapq.heappush(ready, (first_place(counts[k], n, parts - 1), k, n))
        _, k, n = heapq.heappop(ready)
        order[place - 1] = k
        if n + 1 < counts[k]:
            heapq.heappush(waiting, (first_place(counts[k], n + 1, 1), k, n + 1))
    return order
