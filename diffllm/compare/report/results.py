"""Sentences of a report about the result of each row: losses, gaps, tests and divergence."""

from collections.abc import Callable, Sequence

import numpy as np

from diffllm.compare.arms.arm import RunArm
from diffllm.compare.arms.run import EVAL_LOSS, Run, Series
from diffllm.compare.arms.run_search import shortlist
from diffllm.compare.arms.sentences import (
    digits_for,
    finite,
    fixed,
    gap_words,
    interval_words,
    p_text,
    plural,
    share_words,
    trend_sentence,
)
from diffllm.compare.report.curves import gap_band
from diffllm.compare.report.rows import Row
from diffllm.metrics.display import frequency_text
from diffllm.statistics.estimates import Estimate
from diffllm.statistics.gap_tests import ALPHA, holm

NAMED = 4
"""Largest number of rows that a sentence names, and of trends that have a sentence each."""
EQUAL = 0.0005
"""Relative difference below which parameters are called equal."""
FEW_SEEDS = (
    "an interval from two seeds has one degree of freedom: it is very wide (12.7 standard errors "
    "to each side), and its width is uncertain; use at least three seeds"
)


def tested_rows(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.p_holm is not None]


def is_significant(row: Row) -> bool:
    return row.p_holm is not None and row.p_holm < ALPHA


def holm_sentence(rows: list[Row]) -> str:
    """State which gaps are significant; with several gaps, after Holm's correction."""
    tested = tested_rows(rows)
    if not tested:
        return ""
    if len(tested) == 1:
        return single_gap_sentence(tested[0])
    significant = 0
    better = []
    worse = []
    for row in tested:
        if not is_significant(row):
            continue
        significant += 1
        if row.gap and row.gap.mean < 0:
            better.append(row.label)
        elif row.gap and row.gap.mean > 0:
            worse.append(row.label)
    verb = "is" if significant == 1 else "are"
    parts = [
        f"{significant} of {len(tested)} gaps {verb} significant after Holm's correction at "
        f"{ALPHA:g}"
    ]
    if better:
        parts.append(f"better: {shortlist(better, NAMED)}")
    if worse:
        parts.append(f"worse: {shortlist(worse, NAMED)}")
    return f"{'; '.join(parts)}."


def single_gap_sentence(row: Row) -> str:
    p = p_text(row.p_holm)
    sign = " " if p.startswith("<") else " = "
    verdict = "significant" if is_significant(row) else "not significant"
    seeds = plural(row.gap.seeds if row.gap else 0, "seed")
    return f"The gap is {verdict} (p{sign}{p}, {seeds})."


def few_seeds_note(rows: list[Row]) -> str:
    """Return a warning if an interval of a loss or gap is from two seeds, otherwise ""."""
    for row in rows:
        for estimate in (row.loss, row.gap):
            if estimate and estimate.seeds == 2:
                return FEW_SEEDS
    return ""


def has_gaps(rows: list[Row]) -> bool:
    return any(row.gap for row in rows)


def has_intervals(rows: list[Row]) -> bool:
    return any(row.loss is not None and row.loss.low is not None for row in rows)


def gap_tag(row: Row) -> str:
    """Return a remark about a gap for its table cell, or ""; the first one if several apply."""
    outcome, gap = row.outcome, row.gap
    if outcome is None:
        return ""
    if outcome.paired is None or gap is None:
        return "no common seed with finite losses"
    if gap.low is None:
        return "no interval from one seed"
    if outcome.paired.zero_variance:
        return "seeds do not vary: p counts as 1"
    if outcome.favours_diverging:
        return "favours the row with more diverged runs: p counts as 1"
    if gap.holds_zero:
        return "no difference shown"
    return "" if is_significant(row) else "not significant after Holm"


def divergence(row: RunArm, owner: str = "", share: bool = True) -> str:
    """Return a text such as "1 of 3 seeds diverged (33%, 0.84% to 91%)", or "" if no seed diverged.

    Args:
        owner: text inserted after "seeds", such as " of standard".
        share: whether to add the percentage of diverged seeds with its confidence interval.
    """
    if not row.diverged:
        return ""
    text = f"{row.diverged} of {row.diverged_share.runs} seeds{owner} diverged"
    return f"{text} ({share_words(row.diverged_share)})" if share else text


def lost_seeds(row: Row) -> list[str]:
    """Return a text about diverged seeds of a row, and one about those of its baseline, if any."""
    texts = []
    if row.diverged:
        texts.append(divergence(row, share=False))
    base = row.baseline
    if base and base.diverged:
        texts.append(divergence(base, f" of {base.label}", share=False))
    return texts


def size_against(row: RunArm, base: RunArm) -> str:
    """Return a text such as "2.1% more parameters", or "" if a number of parameters is unknown."""
    size = finite(row.fact("parameters"))
    other = finite(base.fact("parameters"))
    if not size or not other:
        return ""
    share = size / other - 1
    if abs(share) < EQUAL:
        return "equal parameters"
    return f"{abs(share):.1%} {'more' if share > 0 else 'fewer'} parameters"


def finding(row: Row) -> str:
    """Describe the result of a row: its gap, or its loss, or its last step if it has no loss."""
    if row.gap is not None and row.baseline is not None:
        base = row.baseline
        gap = gap_words(row.gap, base.label, baseline_loss(row, base))
        parts = [
            f"{row.label}: held-out loss {gap}",
            interval_words(row.gap, signed=True),
            plural(row.gap.seeds, "seed"),
            size_against(row, base),
            divergence(row),
            divergence(base, f" of {base.label}"),
        ]
        return ", ".join(filter(None, parts))
    if row.loss is None:
        ahead = max(row.runs, key=lambda run: run.last_step)
        return f"{row.label}: {divergence(row) or f'not finished: {progress(ahead)}'}"
    entropy = finite(row.fact("heldout_unigram_entropy"))
    parts = [
        f"{row.label}: held-out loss {fixed(row.loss.mean, digits_for(row.loss))} nats per token",
        interval_words(row.loss),
        frequency_text(row.loss.mean, entropy) if entropy is not None and entropy > 0 else "",
        "the baseline" if row.is_baseline else "",
        plural(row.loss.seeds, "seed"),
        divergence(row),
    ]
    return ", ".join(filter(None, parts))


def baseline_loss(row: RunArm, base: RunArm) -> float | None:
    """Return the mean loss of `base` over the seeds that have a loss in both rows."""
    common = row.finite_values.keys() & base.finite_values.keys()
    losses = [base.finite_values[seeds] for seeds in common]
    return sum(losses) / len(losses) if losses else None


def progress(run: Run) -> str:
    text = f"step {run.last_step} of {run.cfg.steps}"
    loss = run.last_value(EVAL_LOSS)
    if loss is not None:
        text += f", held-out sample loss {fixed(loss, 3)} nats per token"
    return text


def trend_sentences(rows: Sequence[Row]) -> list[str]:
    """Return one sentence for each loss gap: how the gap changes over training tokens.

    If there are more than NAMED gaps, describe only the trend with the largest absolute slope.
    This trend is chosen from the trends that are significant after Holm's correction, or from all
    trends if none is significant.
    """
    trends = []
    sentences = []
    for row in rows:
        if row.trend and row.baseline:
            trends.append(row.trend)
            sentences.append(trend_sentence(row.label, row.baseline.label, row.trend))
    if len(trends) <= NAMED:
        return sentences
    # The trends are one family of tests, and the gaps in `make_rows` another.
    adjusted = holm([trend.slope.p for trend in trends])
    tests = 0
    significant = []
    for i, p in enumerate(adjusted):
        if p is not None:
            tests += 1
            if p < ALPHA:
                significant.append(i)
    candidates = significant or range(len(trends))
    largest = max(candidates, key=lambda i: abs(trends[i].slope.mean))
    return [
        f"{len(significant)} of {tests} trends over tokens are significant after Holm's correction "
        f"at {ALPHA:g}. "
        f"Largest: {sentences[largest]}"
    ]


def pairing_note(
    rows: list[Row], name: str, range_of: Callable[[RunArm], tuple[float, float] | None]
) -> str:
    """Explain why losses of rows and the interval of a paired gap seem to disagree, if they do.

    Args:
        name: name of the shown ranges of losses, such as "Bands".
        range_of: function that returns the shown range of a row's loss.
    """
    overlapping = apart = False
    for row in rows:
        if row.gap is None or row.baseline is None or not has_width(row.gap):
            continue
        candidate = range_of(row)
        base = range_of(row.baseline)
        if candidate is None or base is None:
            continue
        if candidate[0] > base[1] or base[0] > candidate[1]:
            apart = apart or row.gap.holds_zero
        elif not row.gap.holds_zero:
            overlapping = True
    notes = []
    if overlapping:
        notes.append(
            f"{name} of two rows can overlap although the interval of their gap excludes 0: a seed "
            "shifts both rows alike, and the gap compares equal seeds."
        )
    if apart:
        notes.append(
            f"{name} of two rows can lie apart although the interval of their gap contains 0: the "
            "interval includes the uncertainty of few seeds."
        )
    return " ".join(notes)


def has_width(gap: Estimate) -> bool:
    """Return whether a gap has an interval and is not equal in all seeds."""
    return gap.interval is not None and not gap.all_equal


def loss_interval(row: RunArm) -> tuple[float, float] | None:
    return row.loss.interval if row.loss else None


def sample_range(row: RunArm) -> tuple[float, float] | None:
    """Return the range over seeds of the last held-out sample loss."""
    last_losses = []
    for run in row.runs:
        loss = run.last_value(EVAL_LOSS)
        if loss is not None and np.isfinite(loss):
            last_losses.append(loss)
    return (min(last_losses), max(last_losses)) if last_losses else None


def noise_floor_note(rows: list[Row], floor: Series) -> str:
    """Explain why the noise floor and the interval of a paired gap seem to disagree, if they do."""
    inside = outside = False
    for row in rows:
        band = gap_band(row)
        if row.gap is None or band is None or not has_width(row.gap):
            continue
        last_gap = abs(band.mean[-1])
        half_width = np.interp(band.x[-1], *floor)
        # A gap that is not finite is neither inside nor outside.
        if not row.gap.holds_zero and last_gap <= half_width:
            inside = True
        if row.gap.holds_zero and half_width < last_gap < np.inf:
            outside = True
    notes = []
    if inside:
        notes.append(
            "A gap can be inside the noise floor although its interval excludes 0: the noise floor "
            "ignores that rows share seeds."
        )
    if outside:
        notes.append(
            "A gap can be outside the noise floor although its interval contains 0: the noise "
            "floor pools the variation of all rows, the interval uses only the seeds of its gap."
        )
    return " ".join(notes)
