"""Numbers, intervals and counts as text."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from diffllm.core.run_files import finite
from diffllm.metrics.display import duration
from diffllm.statistics.divergence import Share
from diffllm.statistics.estimates import Estimate
from diffllm.statistics.gap_tests import Gap
from diffllm.statistics.smallest_p import seeds_for_p, smallest_p
from diffllm.statistics.trend import Trend

MISSING = "–"
SMALL_MEAN = 0.01
TINY_MEAN = 1e-3
PREFIXES = (
    (1e18, "E"),
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "B"),
    (1e6, "M"),
    (1e3, "k"),
)


def with_minus(text: str) -> str:
    return text.replace("-", "−")


def fixed(value: Any, digits: int = 4, signed: bool = False) -> str:
    x = finite(value)
    if x is None:
        return MISSING
    rounded = round(x, digits) + 0.0  # adding 0 makes -0.0 positive
    sign = "+" if signed else ""
    return with_minus(f"{rounded:{sign}.{digits}f}")


def in_digits(value: Any) -> str:
    x = finite(value)
    if x and abs(x) < 0.01:
        return short(x, 2)
    return fixed(x, 3)


def short(value: Any, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, or a missing or infinite one as a dash."""
    x = finite(value)
    if x is None:
        return MISSING
    if x and not 1e-4 <= abs(x) < 1e6:
        mantissa, _, power = f"{x:.{digits - 1}e}".partition("e")
        return with_minus(f"{float(mantissa):g}e{int(power)}")
    return with_minus(f"{float(f'{x:.{digits}g}'):,.10g}")


def two_digits(value: Any) -> str:
    return short(value, 2)


def compact(value: Any, digits: int = 4) -> str:
    x = finite(value)
    if x is None:
        return MISSING
    # Round before the prefix is chosen: 999,960 is 1M, not 1000k.
    rounded = float(f"{x:.{digits}g}")
    for scale, prefix in PREFIXES:
        if abs(rounded) >= scale:
            return with_minus(f"{rounded / scale:.{digits}g}{prefix}")
    return with_minus(f"{rounded:.{digits}g}")


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
    low = fixed(estimate.low, digits, signed)
    high = fixed(estimate.high, digits, signed)
    note = ", uninformative" if estimate.uninformative else ""
    return f"{low} to {high}{note}"


def digits_for(estimate: Estimate) -> int:
    """Return the number of decimals with which a mean and its interval are printed.

    Return 3, or 4 if the absolute mean is below SMALL_MEAN (0.01). If the absolute values of the
    mean and of both interval ends are below TINY_MEAN (0.001), return the number of decimals that
    shows the largest of these values with two significant digits.
    """
    numbers = (estimate.mean, estimate.low, estimate.high)
    largest = max(abs(finite(number) or 0.0) for number in numbers)
    if 0 < largest < TINY_MEAN:
        return 1 - math.floor(math.log10(largest))
    return 3 if abs(estimate.mean) >= SMALL_MEAN else 4


def with_interval(estimate: Estimate, signed: bool = False, digits: int = 0) -> str:
    """Format a mean with its interval, if any, such as "-0.200 (-0.313 to -0.088)".

    Args:
        signed: whether positive numbers have a plus sign.
        digits: number of decimals; 0 selects the result of `digits_for`.
    """
    digits = digits or digits_for(estimate)
    mean = fixed(estimate.mean, digits, signed)
    interval = in_words(estimate, signed, digits)
    return f"{mean} ({interval})" if interval else mean


def interval_words(estimate: Estimate, signed: bool = False) -> str:
    """Return a text such as "95% interval 4.1 to 4.5", or "" if there is no interval."""
    interval = in_words(estimate, signed, digits_for(estimate))
    if not interval or estimate.all_equal:
        return interval
    contains_zero = " (contains 0)" if signed and estimate.holds_zero else ""
    return f"95% interval {interval}{contains_zero}"


def gap_words(gap: Estimate, base: str, base_loss: float | None) -> str:
    """Describe a mean gap, for example "0.168 nats per token (3.1%) lower than standard"."""
    if gap.mean == 0:
        return f"equal to that of {base}"
    share = f" ({percent(abs(gap.mean / base_loss))})" if base_loss else ""
    direction = "lower" if gap.mean < 0 else "higher"
    size = fixed(abs(gap.mean), digits_for(gap))
    return f"{size} nats per token{share} {direction} than {base}"


def trend_sentence(candidate: str, base: str, trend: Trend) -> str:
    """Describe a trend, for example "The gap of diff_v2 to standard shrinks: +0.012 nats ..."."""
    slope = trend.slope.estimate
    digits = digits_for(slope)
    interval = "no interval from one seed"
    if slope.low is not None:
        words = in_words(slope, signed=True, digits=digits)
        label = "" if slope.all_equal else "95% interval "
        interval = f"{label}{words}, {counted_seeds(trend.slope)}"
    start = fixed(trend.start, max(digits, 3), signed=True)
    end = fixed(trend.end, max(digits, 3), signed=True)
    first = compact(trend.first, 3)
    last = compact(trend.last, 3)
    return (
        f"The gap of {candidate} to {base} {trend_direction(trend)}: "
        f"{fixed(slope.mean, digits, signed=True)} nats per token per doubling of tokens "
        f"({interval}), from {start} to {end} on a line "
        f"through {trend.points} evaluations from {first} to {last} tokens."
    )


def trend_direction(trend: Trend) -> str:
    """Describe the trend of the absolute gap: "grows", "shrinks", or "crosses 0".

    If the confidence interval of the slope contains 0, return "shows no trend". If there is no
    interval (a single seed, or equal slopes in all seeds), return "moves", or "stays" for slope 0.
    """
    slope = trend.slope.estimate
    if slope.low is None or slope.all_equal:
        return "moves" if trend.start != trend.end else "stays"
    if slope.holds_zero:
        return "shows no trend"
    if trend.start * trend.end < 0:
        return "crosses 0"
    return "grows" if abs(trend.end) > abs(trend.start) else "shrinks"


def counted_seeds(slope: Gap) -> str:
    """Return the number of seeds of a slope, or the numbers of both arms if they differ."""
    if slope.seeds == slope.base_seeds:
        return plural(slope.seeds, "seed")
    return f"{slope.seeds} and {plural(slope.base_seeds, 'seed')}"


def p_text(p: float | None) -> str:
    if p is None:
        return MISSING
    if p < 0.0001:
        return "< 0.0001"
    return f"{p:.2f}" if p >= 0.1 else f"{p:.2g}"


def range_text(values: Sequence[Any], write: Callable[[Any], str] = compact) -> str:
    """Return a text such as "0.31 to 0.35", or one number if both ends have the same text."""
    low = write(min(values))
    high = write(max(values))
    return low if low == high else f"{low} to {high}"


def plural(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def ascii_minus(text: str) -> str:
    return text.replace("\u2212", "-").replace(MISSING, "-")


def share_words(share: Share) -> str:
    low, high = share.interval
    return f"{percent(share.diverged / share.runs)}, {percent(low)} to {percent(high)}"


def ends(name: str, interval: Any) -> dict[str, Any]:
    """Return columns of report.csv with both ends of an interval; None without an interval."""
    low, high = (interval.low, interval.high) if interval else (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def exact_note(seeds: int, tests: int, alpha: float, sides: int) -> str:
    """Return a warning if a sign-flip test of `seeds` pairs cannot have a p below `alpha`.

    The p is after Holm's correction. Return "" if the test can have such a p.

    Args:
        tests: number of tests in Holm's correction.
        sides: 1 for a one-sided test, 2 for a two-sided test.
    """
    least = smallest_p("paired", seeds, seeds, sides)
    if least * tests < alpha:
        return ""
    family = ""
    if tests > 1:
        family = f" ({min(1, least * tests):.2g} after Holm's correction for {tests} tests)"
    side = "one-sided" if sides == 1 else "two-sided"
    note = (
        f"the smallest {side} p of an exact sign-flip test of {seeds} pairs is "
        f"{least:.2g}{family}, not below alpha {alpha:g}: it cannot confirm the t test, which "
        "assumes normally distributed values"
    )
    enough = seeds_for_p("paired", alpha, tests, sides)
    if enough:
        note += f"; {enough} seeds per arm are enough"
    return note
