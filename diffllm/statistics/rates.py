"""Rates of rare events, with exact intervals."""

from dataclasses import dataclass

from diffllm.statistics.intervals import CONFIDENCE


@dataclass(frozen=True)
class Rate:
    """Events in a number of steps, one or more."""

    count: int
    steps: int

    @property
    def value(self) -> float:
        """Events a thousand steps."""
        return 1000 * self.count / self.steps

    @property
    def low(self) -> float:
        """Lower end of the exact 95% interval of a Poisson law (Garwood, Biometrika 28, 1936)."""
        from scipy.special import gammaincinv  # a third of a second that few processes need

        low = float(gammaincinv(self.count, (1 - CONFIDENCE) / 2)) if self.count else 0.0
        return 1000 * low / self.steps

    @property
    def high(self) -> float:
        from scipy.special import gammaincinv

        return 1000 * float(gammaincinv(self.count + 1, (1 + CONFIDENCE) / 2)) / self.steps
