"""How soon runs reach a level, where some may not have reached it by their end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Times:
    """When each run of an arm reached a level, in tokens; for one that did not, its end."""

    tokens: Sequence[float]
    reached: Sequence[bool]

    @classmethod
    def of(cls, found: Iterable[tuple[float, bool]]) -> "Times":
        """Make them of pairs of tokens and whether the level was reached then."""
        tokens, reached = zip(*found, strict=True)
        return cls(tokens, reached)

    @property
    def count(self) -> int:
        return sum(self.reached)

    @property
    def median(self) -> float | None:
        """The tokens after which half of the runs had reached it, by Kaplan and Meier's estimate;
        None where fewer than half do."""
        at_risk, share = len(self.tokens), 1.0
        for time in sorted(set(self.tokens)):
            here = [hit for at, hit in zip(self.tokens, self.reached, strict=True) if at == time]
            share *= 1 - sum(here) / at_risk
            if share <= 0.5 + 1e-12:
                return float(time)
            at_risk -= len(here)
        return None


def sooner(own: Times, base: Times) -> float | None:
    """Return the one-sided p of the log-rank test that `own` reaches the level in fewer tokens
    (Mantel 1966, without a correction for continuity); None where no run of either reached it.
    """
    from scipy.special import ndtr

    tokens = np.array([*own.tokens, *base.tokens], dtype=np.float64)
    hit = np.array([*own.reached, *base.reached])
    mine = np.arange(len(tokens)) < len(own.tokens)
    excess = variance = 0.0
    for time in np.unique(tokens[hit]):
        at_risk = tokens >= time
        n, n_mine, events = at_risk.sum(), (at_risk & mine).sum(), (hit & (tokens == time)).sum()
        excess += (hit & (tokens == time) & mine).sum() - events * n_mine / n
        if n > 1:
            share = n_mine / n
            variance += events * share * (1 - share) * (n - events) / (n - 1)
    if not variance:
        return None
    return float(ndtr(-excess / variance**0.5))
