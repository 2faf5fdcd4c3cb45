"""Numbers, intervals and counts as text."""

import math
from typing import Any

from diffllm.metrics.display import duration
from diffllm.metrics.records import finite
from diffllm.statistics.divergence import Share
from diffllm.statistics.estimates import Estimate

MISSING = "–"
SMALL = 0.01
TINY = 1e-3
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def with_minus(text: str) -> str:
    return text.replace("-", "−")


def fixed(value: Any, digits: int = 4, signed: bool = False) -> str:
    x = finite(value)
    if x is None:
        return MISSING
    rounded = round(x, digits) + 0.0  # adding 0 makes -0.0 positive
    return with_minus(f"{rounded:{'+' if signed else ''}.{digits}f}")


def in_digits(value: Any) -> str:
    x = finite(value)
    return short(x, 2) if x and abs(x) < 0.01 else fixed(x, 3)


def short(value: Any, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, or a missing or infinite one as a dash."""
    x = finite(value)
    if x is None:
        return MISSING
    if x and not 1e-4 <= abs(x) < 1e6:
        mantissa, _, power = f"{x:.{digits - 1}e}".partition("e")
        return with_minus(f"{float(mantissa):g}e{int(power)}")
    return with_minus(f"{float(f'{x:.{digits}g}'):,.10g}")


def compact(value: Any, digits: int = 4) -> str:
    x = finite(value)
    if x is None:
        return MISSING
    x = float(f"{x:.{digits}g}")  # rounds before the prefix is chosen: 999,960 is 1M, not 1000k
    scale, prefix = next((pair for pair in PREFIXES if abs(x) >= pair[0]), (1, ""))
    return with_minus(f"{x / scale:.{digits}g}{prefix}")


def percent(value: Any) -> str:
    x = finite(value)
    return MISSING if x is None else f"{short(100 * x, 2)}%"


def clock(value: Any) -> str:
    x = finite(value)
    return MISSING if x is None else duration(x)


def in_words(estimate: Estimate, signed: bool = False, digits: int = 4) -> str:
    if finite(estimate.low) is None or finite(estimate.high) is None:
        return ""
    if estimate.all_equal:
        return "equal in all seeds"
    low, high = (fixed(x, digits, signed) for x in (estimate.low, estimate.high))
    return f"{low} to {high}{', uninformative' * estimate.uninformative}"


def digits_for(estimate: Estimate) -> int:
    """Return the number of decimals with which a mean and its interval are printed.

    Return 3, or 4 if the absolute mean is below SMALL (0.01). If the absolute values of the mean
    and of both interval ends are below TINY (0.001), return the number of decimals that shows the
    largest of these values with two significant digits.
    """
    known = [x for each in (estimate.mean, estimate.low, estimate.high) if (x := finite(each))]
    if known and (widest := max(map(abs, known))) < TINY:
        return 1 - math.floor(math.log10(widest))
    return 3 if abs(estimate.mean) >= SMALL else 4


def with_interval(estimate: Estimate, signed: bool = False, digits: int = 0) -> str:
    """Format a mean with its interval, if any, such as "-0.200 (-0.313 to -0.088)".

    Args:
        signed: whether positive numbers have a plus sign.
        digits: number of decimals; 0 selects the result of `digits_for`.
    """
    digits = digits or digits_for(estimate)
    mean, interval = fixed(estimate.mean, digits, signed), in_words(estimate, signed, digits)
    return f"{mean} ({interval})" if interval else mean


def plural(number: int, one: str) -> str:
    return f"{number} {one}{'' if number == 1 else 's'}"


def ascii_minus(text: str) -> str:
    return text.replace("\u2212", "-").replace(MISSING, "-")


def share_words(share: Share) -> str:
    low, high = share.interval
    return f"{percent(share.diverged / share.runs)}, {percent(low)} to {percent(high)}"


def ends(name: str, found: Any) -> dict[str, Any]:
    return {f"{name}_low": found and found.low, f"{name}_high": found and found.high}
