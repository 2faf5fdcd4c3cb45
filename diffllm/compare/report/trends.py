"""Trends of the loss gaps of a report over training tokens."""

from collections.abc import Sequence

from diffllm.compare.arms.arm import Arm
from diffllm.compare.arms.run import EVAL_LOSS
from diffllm.compare.arms.trend import trend_sentence
from diffllm.compare.report.curves import have_equal_tokens
from diffllm.compare.report.results import NAMED
from diffllm.compare.report.rows import Row
from diffllm.statistics.gap_tests import ALPHA, holm
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
        {seed: run.series(EVAL_LOSS) for seed, run in side.measured.items()} for side in (row, base)
    )
    return gap_trend(candidate, other)


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
