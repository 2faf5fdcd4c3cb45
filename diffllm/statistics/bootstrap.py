"""Bootstrap intervals over held-out documents: of a gap between arms, or of one model's loss.

A gap depends on the documents as well as on the seeds, so each draw resamples both.
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
    """Return the reason why an interval is withheld; "" if the interval is shown."""
    if seeds < LEAST_SEEDS:
        return f"withheld: with fewer than {LEAST_SEEDS} seeds its coverage can be below 90%"
    if documents < LEAST_DOCUMENTS:
        return f"withheld: needs {LEAST_DOCUMENTS} documents, has {documents}"
    return ""


@dataclass(frozen=True)
class DrawnGaps:
    """Gaps of bootstrap draws over documents and seeds.

    Percentiles are expanded by the degrees of freedom of the seeds or of the documents, whichever
    are fewer.
    """

    draws: np.ndarray
    """(draws,)"""
    df: int

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return the lower and upper one-sided bounds at confidence 1 - alpha."""
        low, high = central(self.draws, expanded(alpha, self.df)).tolist()
        return low, high

    def p(self, bound: float, side: int) -> float:
        """Return the one-sided p of "the gap is below (-1) or above (1) the bound"."""
        from scipy.special import ndtri, stdtr

        beyond = int((side * (self.draws - bound) <= 0).sum())
        share = (1 + beyond) / (1 + len(self.draws))
        return float(stdtr(self.df, ndtri(share))) if share < 1 else 1.0


def bootstrap(
    own: np.ndarray, base: np.ndarray, tokens: np.ndarray, draws: int = DRAWS
) -> Estimate:
    """Return the mean gap of pairs in nats per token, own minus base, with its 95% interval.

    The arguments are those of `drawn_gaps`.
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
    """Resample documents and seeds, and compute the gap of each draw, own minus base.

    A draw uses the same documents for both arms and all seeds, and the same seeds for both arms if
    `paired`. From n documents (or seeds) a draw takes n - 1 with replacement. The variance of such
    a mean is unbiased (Rao and Wu, 1988), which matters with few seeds.

    Args:
        own, base: (seeds, documents), nats summed over the tokens of each document.
        tokens: (documents,), number of tokens of each document.
        paired: whether runs of equal seed are pairs.
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
    """Draw one seed fewer than `seeds`; return weights of sum 1, (draws, seeds)."""
    return rng.multinomial(seeds - 1, np.full(seeds, 1 / seeds), size=draws) / (seeds - 1)


def of_documents(
    nats: np.ndarray, tokens: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Return the 95% interval of one model's mean in nats per token over documents.

    Return None with fewer than LEAST_OF_ONE documents.

    Args:
        nats: (documents,), nats summed over each document's tokens, or a difference of such sums.
        tokens: (documents,), number of tokens of each document.
    """
    sums, weights = (np.asarray(x, np.float64)[:, None] for x in (nats, tokens))
    return of_columns(sums, weights, draws, seed)[0]


def of_columns(
    sums: np.ndarray, weights: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> list[Interval]:
    """Return the intervals of K means as in `of_documents`; None for a mean without weight.

    A draw uses the same documents for all means.

    Args:
        sums, weights: (documents, K).
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
    """Draw `documents` - 1 documents with replacement, `draws` times.

    Yields counts per document, (part of the draws, documents), in parts that fit into memory.
    """
    size = max(1, CELLS // documents)
    for start in range(0, draws, size):
        count = min(size, draws - start)
        yield rng.multinomial(documents - 1, np.full(documents, 1 / documents), size=count)


def central(found: np.ndarray, tail: float) -> np.ndarray:
    """Return the quantiles `tail` and 1 - `tail` over draws, (2, ...) of (draws, ...)."""
    return np.quantile(found, (tail, 1 - tail), axis=0)


def expanded(tail: float, df: int) -> float:
    """Return the tail under a normal distribution that is as extreme as `tail` under Student's t.

    With few units, percentiles of draws are too narrow; the expanded percentile interval corrects
    this (Hesterberg, arXiv 1411.5279).
    """
    from scipy.special import ndtr, stdtrit

    return float(ndtr(stdtrit(df, tail)))
