"""Trends of loss gaps over training tokens, and sentences about these trends."""

from collections.abc import Sequence

from diffllm.compare.report.curves import LOSS
from diffllm.compare.report.notes import NAMED
from diffllm.compare.report.numbers import compact, digits_for, fixed, in_words, plural
from diffllm.compare.report.rows import Row
from diffllm.statistics.gap_tests import ALPHA, Gap, holm, paired
from diffllm.statistics.trend import FEWEST_POINTS, WINDOW, Trend, common_points, gap_trend


def row_trend(row: Row, base: Row) -> Trend | None:
    """Return the trend over training tokens of the loss of `row` minus the loss of `base`.

    Only runs of common seeds are used. Return None without a common seed, or if all these runs were
    evaluated at fewer than FEWEST_POINTS common numbers of tokens.
    """
    own, theirs = row.measured, base.measured
    seeds = sorted(own.keys() & theirs.keys())
    runs = [side[seed] for side in (own, theirs) for seed in seeds]
    x, values = common_points([run.series(LOSS) for run in runs], WINDOW)
    if len(x) < FEWEST_POINTS:
        return None
    first, second = values[: len(seeds)], values[len(seeds) :]
    return gap_trend(
        x, dict(zip(seeds, first, strict=True)), dict(zip(seeds, second, strict=True)), paired
    )


def trend_sentence(own: str, base: str, trend: Trend) -> str:
    """Return a sentence that begins "The gap of diff_v2 to standard shrinks: +0.012 nats"."""
    slope = trend.slope.estimate
    digits = digits_for(slope)
    interval = "no interval from one seed"
    if slope.low is not None:
        words = in_words(slope, signed=True, digits=digits)
        interval = f"{'' if slope.all_equal else '95% interval '}{words}, {seeds_text(trend.slope)}"
    start, end = (fixed(x, max(digits, 3), signed=True) for x in (trend.start, trend.end))
    first, last = compact(trend.first, 3), compact(trend.last, 3)
    return (
        f"The gap of {own} to {base} {direction(trend)}: {fixed(slope.mean, digits, signed=True)} "
        f"nats per token per doubling of tokens ({interval}), from {start} to {end} on a line "
        f"through {trend.points} evaluations from {first} to {last} tokens."
    )


def direction(trend: Trend) -> str:
    """Return a verb for the change of the absolute gap: "grows", "shrinks" or "crosses 0".

    If the confidence interval of the slope contains 0, return "shows no trend". If there is no
    interval, because of a single seed, return "moves", or "stays" for a constant gap.
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
    """Return one sentence per loss gap about its trend over training tokens.

    For more than NAMED gaps, return one sentence about the trend with the largest absolute slope.
    If trends survive Holm's correction over all trends, only these are considered.
    """
    found = [(row, row.baseline, row.trend) for row in rows if row.trend and row.baseline]
    if len(found) <= NAMED:
        return [trend_sentence(row.label, base.label, trend) for row, base, trend in found]
    tested = [(each, p) for each in found if (p := each[2].slope.p) is not None]
    adjusted = zip(tested, holm([p for _, p in tested]), strict=True)
    kept = [each for (each, _), p in adjusted if p < ALPHA]
    row, base, trend = max(kept or found, key=lambda each: abs(each[2].slope.mean))
    return [
        f"{len(kept)} of {len(tested)} trends over tokens survive Holm's correction at {ALPHA:g}. "
        f"Largest: {trend_sentence(row.label, base.label, trend)}"
    ]
