"""Trends of loss gaps over training tokens, and sentences about these trends."""

from collections.abc import Sequence

from diffllm.compare.arms.arm import Arm
from diffllm.compare.arms.sentences import (
    compact,
    digits_for,
    fixed,
    in_words,
    plural,
)
from diffllm.compare.report.curves import LOSS, have_equal_tokens
from diffllm.compare.report.results import NAMED
from diffllm.compare.report.rows import Row
from diffllm.statistics.gap_tests import ALPHA, Gap, holm
from diffllm.statistics.trend import Trend, gap_trend


def arm_trend(row: Arm, base: Arm) -> Trend | None:
    """Return the trend of the loss gap `row` minus `base` over training tokens.

    Only runs whose seed has a finite final loss in both rows are used. An evaluation is shared if
    it took place at the same number of tokens in all these runs. Return None if there are no such
    runs, if they share fewer than FEWEST_POINTS evaluations after the first 10% of training, or if
    the rows train on different numbers of tokens.
    """
    if not have_equal_tokens(row, base):
        return None
    candidate, other = (
        {seed: run.series(LOSS) for seed, run in side.measured.items()} for side in (row, base)
    )
    return gap_trend(candidate, other)


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


def trend_sentences(rows: Sequence[Row]) -> list[str]:
    """Return one sentence for each loss gap: how the gap changes over training tokens.

    If there are more than NAMED gaps, describe only the trend with the largest absolute slope.
    This trend is chosen from the trends that are significant after Holm's correction, or from all
    trends if none is significant.
    """
    trends = [(row, row.baseline, row.trend) for row in rows if row.trend and row.baseline]
    if len(trends) <= NAMED:
        return [trend_sentence(row.label, base.label, trend) for row, base, trend in trends]
    adjusted = holm([trend.slope.p for _, _, trend in trends])
    tests = sum(p is not None for p in adjusted)
    significant = []
    for gap_and_trend, p in zip(trends, adjusted, strict=True):
        if p is not None and p < ALPHA:
            significant.append(gap_and_trend)
    # The third item is the trend.
    row, base, trend = max(significant or trends, key=lambda item: abs(item[2].slope.mean))
    return [
        f"{len(significant)} of {tests} trends over tokens are significant after Holm's correction "
        f"at {ALPHA:g}. "
        f"Largest: {trend_sentence(row.label, base.label, trend)}"
    ]
