"""Collectives of a training step, and the bytes that they send."""

from enum import Enum
from typing import NamedTuple


class Collective(Enum):
    all_gather = "all-gather"
    reduce_scatter = "reduce-scatter"
    all_reduce = "all-reduce"
    all_to_all = "all-to-all"
    broadcast = "broadcast"

    def on_the_wire(self, size: int, ranks: int) -> float:
        """Return the number of bytes that each rank sends in a collective over `ranks` ranks.

        `size` is the size of one rank's input or output in bytes, whichever is larger.
        """
        if self is Collective.broadcast:
            return size
        return (2 if self is Collective.all_reduce else 1) * size * (ranks - 1) / ranks


class Call(NamedTuple):
    kind: Collective
    size: int
    """Bytes of the input or the output, whichever is larger."""
    ranks: tuple[int, ...]
