"""The trend of a loss gap over training tokens, and its sentence."""

from diffllm.compare.arms.arm import Arm, have_equal_tokens
from diffllm.compare.arms.sentences import compact, digits_for, fixed, in_words, plural
from diffllm.statistics.gap_tests import Gap, Seed
from diffllm.statistics.trend import Trend, gap_trend


def loss_trend(candidate: Arm[Seed], base: Arm[Seed]) -> Trend | None:
    """Return the trend of the gap `candidate` minus `base` over training tokens.

    Seeds that diverged in an arm are omitted. An evaluation is common if it took place at the same
    number of tokens in all runs. Return None if the runs have fewer than FEWEST_POINTS common
    evaluations after the first 10% of training, or if the arms train on different numbers of
    tokens.
    """
    if not have_equal_tokens(candidate, base):
        return None
    return gap_trend(candidate.curves, base.curves)


def trend_sentence(candidate: str, base: str, trend: Trend) -> str:
    """Describe a trend, for example "The gap of diff_v2 to standard shrinks: +0.012 nats ..."."""
    slope = trend.slope.estimate
    digits = digits_for(slope)
    interval = "no interval from one seed"
    if slope.low is not None:
        words = in_words(slope, signed=True, digits=digits)
        interval = f"{'' if slope.all_equal else '95% interval '}{words}, {seeds_text(trend.slope)}"
    start, end = (fixed(x, max(digits, 3), signed=True) for x in (trend.start, trend.end))
    first, last = compact(trend.first, 3), compact(trend.last, 3)
    return (
        f"The gap of {candidate} to {base} {direction(trend)}: "
        f"{fixed(slope.mean, digits, signed=True)} nats per token per doubling of tokens "
        f"({interval}), from {start} to {end} on a line "
        f"through {trend.points} evaluations from {first} to {last} tokens."
    )


def direction(trend: Trend) -> str:
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


def seeds_text(slope: Gap) -> str:
    if slope.seeds == slope.base_seeds:
        return plural(slope.seeds, "seed")
    return f"{slope.seeds} and {plural(slope.base_seeds, 'seed')}"
