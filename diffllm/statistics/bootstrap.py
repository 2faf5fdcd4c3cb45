"""Bootstrap confidence intervals of one model's results, by resampling documents or examples."""

from collections.abc import Iterator

import numpy as np

from diffllm.statistics.estimates import CONFIDENCE

RESAMPLES = 2000
LEAST_DOCUMENTS = 20
"""Minimum number of documents of a held-out split."""
LEAST_OF_ONE = 8
"""Minimum number of documents for the interval of one model."""
CHUNK_CELLS = 4_000_000
"""Largest number of counts in a chunk of draws, 32 MB."""
Interval = tuple[float, float] | None


def of_documents(
    nats: np.ndarray, tokens: np.ndarray, draws: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Return the 95% bootstrap interval of a loss, or of a loss gap, in nats per token.

    The bootstrap resamples documents. Return None with fewer than LEAST_OF_ONE documents.

    Args:
        nats: (documents,), sum of one model's token losses in each document. For a loss gap, the
            difference of these sums between two models.
        tokens: (documents,), number of tokens of each document.
    """
    sums = np.asarray(nats, np.float64)[:, None]
    weights = np.asarray(tokens, np.float64)[:, None]
    [interval] = of_columns(sums, weights, draws, seed)
    return interval


def of_columns(
    sums: np.ndarray, weights: np.ndarray, draws: int = RESAMPLES, seed: int = 0
) -> list[Interval]:
    """Return the 95% confidence interval of each of K weighted means, by resampling documents.

    `sums` and `weights` have shape (documents, K). Mean k is the sum of `sums[:, k]` divided by the
    sum of `weights[:, k]`. All means in a draw use the same documents. Interval k is None if,
    in at least one draw, all weights of mean k are 0. All intervals are None if fewer than
    LEAST_OF_ONE documents have a weight above 0.
    """
    # A document without weight adds nothing to a mean, but would count as a degree of freedom.
    has_weight = (weights > 0).any(1)
    if has_weight.sum() < LEAST_OF_ONE:
        return [None] * sums.shape[1]
    sums, weights = sums[has_weight], weights[has_weight]
    documents = len(sums)
    rng = np.random.default_rng(seed)
    means = []
    # 0 / 0 is NaN, which the loop over the intervals turns into None.
    with np.errstate(invalid="ignore"):
        for counts in drawn_documents(rng, documents, draws):
            totals = counts @ sums  # (draws in this chunk, K)
            total_weights = counts @ weights
            means.append(totals / total_weights)
    tail = expanded_tail((1 - CONFIDENCE) / 2, documents - 1)
    ends = np.quantile(np.concatenate(means), (tail, 1 - tail), axis=0)
    intervals: list[Interval] = []
    for low, high in ends.T.tolist():
        # Without weight a mean is NaN, for which the comparison is false.
        intervals.append((low, high) if low <= high else None)
    return intervals


def drawn_documents(rng: np.random.Generator, documents: int, draws: int) -> Iterator[np.ndarray]:
    """Yield how often each document occurs in each bootstrap draw, in chunks that fit into memory.

    Each chunk has shape (draws in this chunk, documents). A draw takes `documents` - 1 documents
    with replacement.
    """
    size = max(1, CHUNK_CELLS // documents)
    shares = np.full(documents, 1 / documents)
    for start in range(0, draws, size):
        count = min(size, draws - start)
        # With n - 1 draws of n documents, the variance of a mean has no bias; with n draws, it is
        # too small by the factor (n - 1) / n.
        yield rng.multinomial(documents - 1, shares, size=count)


def expanded_tail(tail: float, df: int) -> float:
    from scipy.special import ndtr, stdtrit

    # Percentiles of few documents or seeds are too narrow: expand them (Hesterberg, 1411.5279).
    t_quantile = stdtrit(df, tail)
    return float(ndtr(t_quantile))
