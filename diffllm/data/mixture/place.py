"""Places in the order of samples, as checkpoints store them."""

from dataclasses import dataclass
from typing import Any

from diffllm.core.typed import made
from diffllm.data.mixture.order import in_parts

MOST = 2**53
"""Every count in a place is below it."""


@dataclass(frozen=True)
class EpochPlace:
    """The place before a sample of one source."""

    seed: int
    epoch: int
    sample: int


@dataclass(frozen=True)
class MixturePlace:
    """The place before a sample of a mixture."""

    seed: int
    sample: int
    consumed: dict[str, int]
    """Samples of each source before `sample`."""
    since: int
    """First sample of the order that `weights` define."""
    before: dict[str, int]
    """Samples of each source before `since`."""
    weights: list[list[float]]
    """First samples of segments, rising, each with the shares of all sources."""

    def check(self) -> None:
        """Raise ValueError for counts and weights that no mixture can have."""
        check_counts([self.sample, self.since, *self.consumed.values(), *self.before.values()])
        if [*self.before] != [*self.consumed]:
            raise ValueError("before and consumed must have the same sources")
        if sum(self.consumed.values()) != self.sample or sum(self.before.values()) != self.since:
            raise ValueError("the samples of all sources must add up to sample and since")
        for row in self.weights:
            start, *shares = row or [0.5]
            whole = len(shares) == len(self.consumed) and abs(sum(shares) - 1) < 1e-6
            if not (whole and start == int(start)):
                raise ValueError(f"weights has {row}, not a start and the shares of all sources")
            in_parts(shares)
        starts = [int(start) for start, *_ in self.weights]
        check_counts(starts)
        if sorted(starts) != starts or starts[:1] > [self.since] or self.since > self.sample:
            raise ValueError("the starts in weights, since and sample must rise")


def check_counts(counts: list[int]) -> None:
    """Raise ValueError for a negative or a very large count."""
    if not 0 <= min(counts, default=0) <= max(counts, default=0) < MOST:
        raise ValueError(f"sample counts must be from 0 to {MOST - 1}")


def check_place(state: Any) -> None:
    """Raise ValueError unless this is the JSON of a place, or empty, as before the first step."""
    if isinstance(state, dict) and "consumed" in state:
        made(MixturePlace, state).check()
    elif state != {}:
        place = made(EpochPlace, state)
        check_counts([place.epoch, place.sample])
