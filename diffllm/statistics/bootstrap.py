"""Bootstrap intervals over held-out documents: of a gap between two arms, or of one model's loss.

An arm is the runs of one variant. A gap depends on the documents as well as on the seeds, so each
draw resamples both.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diffllm.statistics.estimates import CONFIDENCE, Estimate

DRAWS = 2000
LEAST_SEEDS = 8
"""Fewest seeds for which an interval is shown. With this number, the coverage of the interval is
above 90% even if only seeds vary. docs/statistics.md has the table."""
LEAST_DOCUMENTS = 20
LEAST_OF_ONE = 8
CELLS = 4_000_000
Interval = tuple[float, float] | None


def withheld(seeds: int, documents: int) -> str:
    """Return the reason to hide a bootstrap confidence interval, or "" to show the interval.

    The reason is too small a number of `seeds` or `documents`.
    """
    if seeds < LEAST_SEEDS:
        return f"withheld: with fewer than {LEAST_SEEDS} seeds its coverage can be below 90%"
    if documents < LEAST_DOCUMENTS:
        return f"withheld: needs {LEAST_DOCUMENTS} documents, has {documents}"
    return ""


@dataclass(frozen=True)
class DrawnGaps:
    """Gaps between two variants in bootstrap draws over documents and seeds.

    `df` is the smallest number of seeds or documents, minus 1. Confidence bounds are widened as
    Student's t with `df` degrees of freedom is wider than the normal distribution.
    """

    draws: np.ndarray
    """(draws,)"""
    df: int

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return a lower and an upper one-sided confidence bound of the gap.

        Args:
            alpha: probability that one bound is wrong.
        """
        low, high = central(self.draws, expanded(alpha, self.df)).tolist()
        return low, high

    def p(self, bound: float, side: int) -> float:
        """Return the one-sided p-value of "the gap is below `bound`" (side -1) or "above" (1)."""
        from scipy.special import ndtri, stdtr

        beyond = int((side * (self.draws - bound) <= 0).sum())
        share = (1 + beyond) / (1 + len(self.draws))
        return float(stdtr(self.df, ndtri(share))) if share < 1 else 1.0


def bootstrap(
    own: np.ndarray, base: np.ndarray, tokens: np.ndarray, draws: int = DRAWS
) -> Estimate:
    """Return the mean gap, own minus base, in nats per token, with its 95% bootstrap interval.

    Args:
        own, base: (seeds, documents), loss in nats, summed over the tokens of each document. Equal
            rows of both have the same seed.
        tokens: (documents,), number of tokens of each document.
    """
    gap = float(((np.asarray(own) - base).sum(axis=1) / np.sum(tokens)).mean())
    found = drawn_gaps(own, base, tokens, draws=draws)
    low, high = central(found.draws, (1 - CONFIDENCE) / 2).tolist()
    return Estimate(gap, low, high, len(own))


def drawn_gaps(
    own: np.ndarray,
    base: np.ndarray,
    tokens: np.ndarray,
    paired: bool = True,
    log: bool = False,
    draws: int = DRAWS,
) -> DrawnGaps:
    """Resample documents and seeds `draws` times; return the gap, own minus base, of each draw.

    From n documents (or seeds) a draw takes n - 1 with replacement. The variance of such a mean is
    unbiased (Rao and Wu, 1988), which matters with few seeds. All runs of a draw use the same
    documents.

    Args:
        own, base: (seeds, documents), loss in nats, summed over the tokens of each document.
        tokens: (documents,), number of tokens of each document.
        paired: whether equal rows of `own` and `base` have the same seed; then a draw takes the
            same seeds from both.
        log: whether to compute the gap of the logarithms of the losses.
    """
    sides = [np.asarray(side, np.float64) for side in (own, base)]
    weights = np.asarray(tokens, np.float64)
    rng, found = np.random.default_rng(0), []
    for texts in drawn_documents(rng, len(weights), draws):
        # Paired arms share one draw of seeds, because `drawn * 2` repeats the single entry.
        drawn = [seeds_drawn(rng, len(side), len(texts)) for side in sides[: 1 if paired else 2]]
        losses = [(texts @ side.T) / (texts @ weights)[:, None] for side in sides]
        first, second = (
            ((np.log(of_seed) if log else of_seed) * seeds).sum(axis=1)
            for of_seed, seeds in zip(losses, drawn * 2, strict=False)
        )
        found.append(first - second)
    df = min(len(sides[0]), len(sides[1]), len(weights)) - 1
    return DrawnGaps(np.concatenate(found), df)


def seeds_drawn(rng: np.random.Generator, seeds: int, draws: int) -> np.ndarray:
    """Return the weight of each seed in each bootstrap draw, (draws, seeds), with sum 1 per draw.

    A draw takes `seeds` - 1 seeds with replacement.
    """
    return rng.multinomial(seeds - 1, np.full(seeds, 1 / seeds), size=draws) / (seeds - 1)


def of_documents(
    nats: np.ndarray, tokens: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Return the 95% bootstrap interval over documents of one model's loss in nats per token.

    Return None with fewer than LEAST_OF_ONE documents.

    Args:
        nats: (documents,), loss summed over each document's tokens, or a difference of such sums.
        tokens: (documents,), number of tokens of each document.
        seed: seed of the random draws.
    """
    sums, weights = (np.asarray(x, np.float64)[:, None] for x in (nats, tokens))
    return of_columns(sums, weights, draws, seed)[0]


def of_columns(
    sums: np.ndarray, weights: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> list[Interval]:
    """Return the 95% bootstrap intervals of K weighted means over documents.

    Mean k is the sum of `sums[:, k]` divided by the sum of `weights[:, k]`. A draw uses the same
    documents for all means. An interval is None if the weights of a draw sum to 0. All intervals
    are None with fewer than LEAST_OF_ONE documents that have a weight.

    Args:
        sums, weights: (documents, K), such as nats and numbers of tokens.
    """
    there = (weights > 0).any(1)
    if there.sum() < LEAST_OF_ONE:
        return [None] * sums.shape[1]
    sums, weights = sums[there], weights[there]
    draw = drawn_documents(np.random.default_rng(seed), len(sums), draws)
    with np.errstate(invalid="ignore"):
        found = np.concatenate([(texts @ sums) / (texts @ weights) for texts in draw])
    low, high = central(found, expanded((1 - CONFIDENCE) / 2, len(sums) - 1))
    pairs = zip(low.tolist(), high.tolist(), strict=True)
    # Without weight a mean is NaN, for which the comparison is false.
    return [pair if pair[0] <= pair[1] else None for pair in pairs]


def drawn_documents(rng: np.random.Generator, documents: int, draws: int) -> Iterator[np.ndarray]:
    """Yield the number of times that each document occurs in each bootstrap draw.

    A draw takes `documents` - 1 documents with replacement. Each yielded array is (some draws,
    documents) and fits into memory; all arrays together have `draws` rows.
    """
    size = max(1, CELLS // documents)
    for start in range(0, draws, size):
        count = min(size, draws - start)
        yield rng.multinomial(documents - 1, np.full(documents, 1 / documents), size=count)


def central(found: np.ndarray, tail: float) -> np.ndarray:
    """Return the quantiles `tail` and 1 - `tail` over the first axis of `found`.

    The shapes are (draws, ...) for `found` and (2, ...) for the result.
    """
    return np.quantile(found, (tail, 1 - tail), axis=0)


def expanded(tail: float, df: int) -> float:
    """Return the normal tail probability at the quantile of Student's t for probability `tail`.

    Bootstrap percentiles of few units are too narrow. The expanded percentile interval corrects
    this (Hesterberg, arXiv 1411.5279).
    """
    from scipy.special import ndtr, stdtrit

    return float(ndtr(stdtrit(df, tail)))
