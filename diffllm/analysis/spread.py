"""How large the values of a tensor are, counted piece by piece: no piece is kept.

Values larger than all others are merged from piece to piece, moments are summed in float64, and
percentiles come from a histogram of magnitudes whose bins are 512 an octave: within 0.1%.
"""

import math

import torch
from torch import Tensor

LEFT_OUT = 14
"""Low bits of a float32 that its bin does not know; 9 bits of its mantissa are left."""
BINS = 2 ** (31 - LEFT_OUT)
TOP = (1, 2, 3, 10, 100)
PERCENTILES = {"median": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "p99.99": 99.99}


class Spread:
    """The sizes of many values, of which pieces are added."""

    def __init__(self) -> None:
        self.count = 0
        self.largest = torch.zeros(0)
        """The largest magnitudes, descending, as many as `TOP` wants."""
        self.bins = torch.zeros(BINS, dtype=torch.int64)
        self.sums = torch.zeros(4, dtype=torch.float64)
        """Sums of the values' first four powers."""

    def add(self, values: Tensor) -> None:
        """Take a piece of any shape, whose values are finite."""
        flat = values.detach().float().flatten()
        sizes, wide = flat.abs(), flat.double()
        self.count += len(flat)
        largest = torch.cat((self.largest.to(flat.device), sizes))
        self.largest = largest.topk(min(TOP[-1], len(largest))).values.cpu()
        self.bins += torch.bincount(sizes.view(torch.int32) >> LEFT_OUT, minlength=BINS).cpu()
        squares = wide.square()
        powers = (wide, squares, squares * wide, squares.square())
        self.sums += torch.stack([power.sum() for power in powers]).cpu()

    def merge(self, other: "Spread") -> None:
        """Take the values of another."""
        self.count += other.count
        both = torch.cat((self.largest, other.largest))
        self.largest = both.topk(min(TOP[-1], len(both))).values
        self.bins += other.bins
        self.sums += other.sums

    def percentile(self, percent: float) -> float:
        """Return the magnitude that so many percent of the values do not exceed, within 0.1%."""
        rank = max(1, math.ceil(percent / 100 * self.count))
        place = int(torch.searchsorted(self.bins.cumsum(0), rank))
        ends = torch.tensor([place, place + 1], dtype=torch.int32) << LEFT_OUT
        low, high = ends.view(torch.float32).tolist()
        return (low + high) / 2 if place else 0.0

    @property
    def kurtosis(self) -> float | None:
        """E[(x - mean)^4] / E[(x - mean)^2]^2 of all values together; None where they are equal."""
        mean, second, third, fourth = (self.sums / self.count).tolist()
        variance = second - mean**2
        if variance <= 1e-12 * second:
            return None
        return (fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / variance**2

    def numbers(self) -> dict[str, float | None]:
        """Return `top_<k>` magnitudes, percentiles of magnitudes, RMS and kurtosis; None for a
        `top_<k>` of fewer values."""
        top = {f"top_{k}": self.largest[k - 1].item() if k <= self.count else None for k in TOP}
        percentiles = {name: self.percentile(percent) for name, percent in PERCENTILES.items()}
        rms = math.sqrt(self.sums[1].item() / self.count)
        return {**top, **percentiles, "rms": rms, "kurtosis": self.kurtosis}
