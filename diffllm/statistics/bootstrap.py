"""Bootstrap confidence intervals of one model's results, by resampling documents or examples."""

from collections.abc import Iterator

import numpy as np

from diffllm.statistics.estimates import CONFIDENCE

DRAWS = 2000
LEAST_DOCUMENTS = 20
LEAST_OF_ONE = 8
CELLS = 4_000_000
Interval = tuple[float, float] | None


def of_documents(
    nats: np.ndarray, tokens: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Return the 95% bootstrap interval of a loss, or of a loss gap, in nats per token.

    The bootstrap resamples documents. Return None with fewer than LEAST_OF_ONE documents.

    Args:
        nats: (documents,), sum of one model's token losses in each document. For a loss gap, the
            difference of these sums between two models.
        tokens: (documents,), number of tokens of each document.
    """
    sums, weights = (np.asarray(x, np.float64)[:, None] for x in (nats, tokens))
    return of_columns(sums, weights, draws, seed)[0]


def of_columns(
    sums: np.ndarray, weights: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> list[Interval]:
    """Return the 95% confidence interval of each of K weighted means, by resampling documents.

    `sums` and `weights` have shape (documents, K). Mean k is the sum of `sums[:, k]` divided by the
    sum of `weights[:, k]`. All means in a draw use the same documents. Interval k is None if,
    in at least one draw, all weights of mean k are 0. All intervals are None if fewer than
    LEAST_OF_ONE documents have a weight above 0.
    """
    there = (weights > 0).any(1)
    if there.sum() < LEAST_OF_ONE:
        return [None] * sums.shape[1]
    sums, weights = sums[there], weights[there]
    draw = drawn_documents(np.random.default_rng(seed), len(sums), draws)
    with np.errstate(invalid="ignore"):
        found = np.concatenate([(texts @ sums) / (texts @ weights) for texts in draw])
    low, high = low_and_high(found, expanded_tail((1 - CONFIDENCE) / 2, len(sums) - 1))
    pairs = zip(low.tolist(), high.tolist(), strict=True)
    # Without weight a mean is NaN, for which the comparison is false.
    return [pair if pair[0] <= pair[1] else None for pair in pairs]


def drawn_documents(rng: np.random.Generator, documents: int, draws: int) -> Iterator[np.ndarray]:
    """Yield how often each document occurs in each bootstrap draw, in chunks that fit into memory.

    Each chunk has shape (draws in this chunk, documents). A draw takes `documents` - 1 documents
    with replacement.
    """
    size = max(1, CELLS // documents)
    for start in range(0, draws, size):
        count = min(size, draws - start)
        yield rng.multinomial(documents - 1, np.full(documents, 1 / documents), size=count)


def low_and_high(draws: np.ndarray, tail: float) -> np.ndarray:
    return np.quantile(draws, (tail, 1 - tail), axis=0)


def expanded_tail(tail: float, df: int) -> float:
    from scipy.special import ndtr, stdtrit

    # Percentiles of few documents or seeds are too narrow: expand them (Hesterberg, 1411.5279).
    return float(ndtr(stdtrit(df, tail)))
