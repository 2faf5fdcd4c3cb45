"""Best-fit-decreasing bin packing of many items of few sizes.

Items go into bins largest first, each into the fullest bin that still has room for it, as in
"Fewer Truncations Improve Language Modeling" (Ding et al., 2024, arXiv 2404.10830). Bins with the
same room are alike, and the fullest that takes one item of a size takes the next one too, as long
as there is room: so items of a size are put into bins of a room all at once, and the number of
steps hangs on the sizes and rooms that there are, not on the items.
"""

from bisect import bisect_left, insort

import numpy as np


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack items of `sizes` (n,), integers from 1 to `capacity`, into bins.

    Of items of one size the first comes first, and of equally full bins the one that was begun
    first is filled. Returns the bin of each item, (n,) int64, and the number of bins, which are
    numbered as they were begun.
    """
    assert not len(sizes) or (sizes.min() >= 1 and sizes.max() <= capacity)
    bins = np.empty(len(sizes), np.int64)
    open_bins, count = Bins(), 0
    for items in by_size(sizes, capacity):
        size = int(sizes[items[0]])
        while len(items):
            room = open_bins.least_room(size)
            if room is not None:
                here = open_bins.take(room)
            else:
                room = capacity
                here = np.arange(count, count - (-len(items) // (capacity // size)))
                count += len(here)
            each = room // size
            used = min(len(here), -(-len(items) // each))
            taken = min(len(items), used * each)
            bins[items[:taken]] = np.repeat(here[:used], each)[:taken]
            items = items[taken:]
            last = taken - (used - 1) * each  # items of the last of these bins
            open_bins.put(room - each * size, here[: used - 1])
            open_bins.put(room - last * size, here[used - 1 : used])
            open_bins.put(room, here[used:])
    return bins, count


def by_size(sizes: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Group the numbers of items by size, largest first; those of one size rise."""
    # numpy sorts 16 bits by radix
    dtype = np.uint16 if capacity <= 2**16 else np.int64
    order = np.argsort((capacity - sizes).astype(dtype), kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1)[::-1]
    return np.split(order, np.cumsum(counts[counts > 0])[:-1]) if len(sizes) else []


class Bins:
    """Bins that have room left, by their room."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        """The rooms that there are, rising."""
        self._bins: dict[int, list[np.ndarray]] = {}
        """The bins of a room, in parts that rise each."""

    def least_room(self, size: int) -> int | None:
        """Return the least room of a bin that is at least `size`; None where there is none."""
        place = bisect_left(self._rooms, size)
        return self._rooms[place] if place < len(self._rooms) else None

    def take(self, room: int) -> np.ndarray:
        """Take out all bins with this room, rising."""
        del self._rooms[bisect_left(self._rooms, room)]
        parts = self._bins.pop(room)
        if len(parts) == 1:
            return parts[0]
        return np.sort(np.concatenate(parts), kind="stable")

    def put(self, room: int, bins: np.ndarray) -> None:
        """Add bins with this room, rising; full ones are never asked for again."""
        if not room or not len(bins):
            return
        if room not in self._bins:
            insort(self._rooms, room)
            self._bins[room] = []
        self._bins[room].append(bins)
