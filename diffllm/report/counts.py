"""Counts and their exact 95% intervals: events of runs, and runs that diverged."""

from dataclasses import dataclass

from diffllm.report.numbers import percent, short

CONFIDENCE = 0.95
SIDE = (1 - CONFIDENCE) / 2
"""Share of cases that an interval may miss on either side."""


@dataclass(frozen=True)
class Counted:
    """A rate or a share, with its interval."""

    count: int
    of: int
    value: float
    low: float
    high: float


def events_per_1000(events: int, steps: int) -> Counted | None:
    """Events a thousand steps, with the exact interval of a Poisson law (F. Garwood, Biometrika 28,
    1936); None where no step could be judged."""
    from scipy.special import gammaincinv  # a third of a second that importing us need not take

    if not steps:
        return None
    low = float(gammaincinv(events, SIDE)) if events else 0.0
    high = float(gammaincinv(events + 1, 1 - SIDE))
    return Counted(events, steps, *(1000 * x / steps for x in (events, low, high)))


def share_of(count: int, runs: int) -> Counted | None:
    """The share of runs, with the exact interval of a binomial law (C. J. Clopper, E. S. Pearson,
    Biometrika 26, 1934); None without runs."""
    from scipy.special import betaincinv

    if not runs:
        return None
    low = float(betaincinv(count, runs - count + 1, SIDE)) if count else 0.0
    high = float(betaincinv(count + 1, runs - count, 1 - SIDE)) if count < runs else 1.0
    return Counted(count, runs, count / runs, low, high)


def share_text(share: Counted) -> str:
    """ "33%, 0.84% to 91%"."""
    return f"{percent(share.value)}, {percent(share.low)} to {percent(share.high)}"


def rate_text(rate: Counted) -> str:
    """ "0.63 to 4.6": the ends of an interval."""
    return f"{short(rate.low, 2)} to {short(rate.high, 2)}"
