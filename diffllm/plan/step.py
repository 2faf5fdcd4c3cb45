"""Result of a simulated step: memory by purpose, and collectives."""

from dataclasses import dataclass
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
        # An all-reduce is a reduce-scatter and then an all-gather.
        passes = 2 if self is Collective.all_reduce else 1
        return passes * size * (ranks - 1) / ranks


class Call(NamedTuple):
    kind: Collective
    size: int
    """Bytes of the input or the output, whichever is larger."""
    ranks: tuple[int, ...]


class Kind(Enum):
    """The purpose of allocated memory."""

    parameters = "parameters"
    gradients = "gradients"
    optimizer = "optimizer state"
    activations = "activations"
    """Results of a forward pass that the backward pass needs."""
    communication = "communication"
    """Gathered parameters, gradients before reduction, buffers of collectives."""
    working = "working memory"
    other = "other state"


class Peak(NamedTuple):
    """Largest memory use of a process in bytes, in total and by purpose.

    `event` is the number of allocations, resizes and releases recorded up to the peak.
    """

    total: int
    by_kind: dict[Kind, int]
    event: int


@dataclass
class Step:
    """Memory (in bytes) and collectives of one rank in a simulated training step."""

    activations: int
    """Bytes that one forward pass keeps for the backward pass."""
    peak: Peak
    """Largest memory use of a step with all statistics and probes."""
    when: str
    """Phase of the step with the peak, such as "forward pass"."""
    calls: list[Call]
