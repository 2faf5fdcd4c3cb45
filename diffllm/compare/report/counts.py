"""Counts in words, with their exact intervals."""

from diffllm.compare.report.numbers import percent, short
from diffllm.statistics.arm_comparison import Share
from diffllm.statistics.estimates import Rate


def share_words(share: Share) -> str:
    """ "33%, 0.84% to 91%"."""
    low, high = share.interval
    return f"{percent(share.diverged / share.runs)}, {percent(low)} to {percent(high)}"


def rate_words(rate: Rate) -> str:
    return f"{short(rate.low, 2)} to {short(rate.high, 2)}"
