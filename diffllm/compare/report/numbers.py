"""Numbers as a report writes them."""

from typing import Any

from diffllm.core.files.records import finite
from diffllm.metrics.display import duration
from diffllm.statistics.arm_comparison import Share
from diffllm.statistics.estimates import Estimate, Rate

MISSING = "–"
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def with_minus(text: str) -> str:
    return text.replace("-", "−")


def fixed(value: Any, digits: int = 4, signed: bool = False) -> str:
    """With that many decimals."""
    x = finite(value)
    return MISSING if x is None else with_minus(f"{x:{'+' if signed else ''}.{digits}f}")


def in_digits(value: Any) -> str:
    """With three decimals, or two digits where it is small."""
    x = finite(value)
    return short(x, 2) if x and abs(x) < 0.01 else fixed(x, 3)


def short(value: Any, digits: int = 3) -> str:
    """That many significant digits; powers of ten where there would be many zeros."""
    x = finite(value)
    if x is None:
        return MISSING
    if x and not 1e-4 <= abs(x) < 1e6:
        mantissa, _, power = f"{x:.{digits - 1}e}".partition("e")
        return with_minus(f"{float(mantissa):g}e{int(power)}")
    return with_minus(f"{float(f'{x:.{digits}g}'):,.10g}")


def compact(value: Any, digits: int = 4) -> str:
    """573k, 11.03M, 1.5B."""
    x = finite(value)
    if x is None:
        return MISSING
    scale, prefix = next((pair for pair in PREFIXES if abs(x) >= pair[0]), (1, ""))
    return with_minus(f"{x / scale:.{digits}g}{prefix}")


def percent(value: Any) -> str:
    x = finite(value)
    return MISSING if x is None else f"{short(100 * x, 2)}%"


def clock(value: Any) -> str:
    """Seconds as 0:42, 4:03 or 1:02:03."""
    x = finite(value)
    return MISSING if x is None else duration(x)


def in_words(estimate: Estimate, signed: bool = False) -> str:
    """Its 95% interval in words; nothing from a single seed."""
    if finite(estimate.low) is None or finite(estimate.high) is None:
        return ""
    low, high = (fixed(x, signed=signed) for x in (estimate.low, estimate.high))
    return f"{low} to {high}"


def ascii_minus(text: str) -> str:
    """Signs and dashes that any terminal has, and that can be searched for."""
    return text.replace("\u2212", "-").replace(MISSING, "-")


def share_words(share: Share) -> str:
    """ "33%, 0.84% to 91%"."""
    low, high = share.interval
    return f"{percent(share.diverged / share.runs)}, {percent(low)} to {percent(high)}"


def rate_words(rate: Rate) -> str:
    return f"{short(rate.low, 2)} to {short(rate.high, 2)}"
