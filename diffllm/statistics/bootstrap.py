"""Bootstrap intervals over held-out documents: of a gap between arms, or of one model's loss.

Other documents would have given another gap, so documents and seeds are both drawn anew.
"""

from collections.abc import Iterator

import numpy as np

from diffllm.statistics.estimates import CONFIDENCE, Estimate

DRAWS = 2000
LEAST_SEEDS = 8
"""Fewest seeds with which the interval covers the truth in more than 90 of 100 cases, even if only
seeds vary; with fewer it is withheld. docs/statistics.md has the table."""
LEAST_DOCUMENTS = 20
LEAST_OF_ONE = 8
CELLS = 4_000_000


def withheld(seeds: int, documents: int) -> str:
    """Return the reason why an interval is withheld; "" if it is not."""
    if seeds < LEAST_SEEDS:
        return f"withheld: with fewer than {LEAST_SEEDS} seeds it can cover less than 90%"
    if documents < LEAST_DOCUMENTS:
        return f"withheld: it takes {LEAST_DOCUMENTS} documents, these are {documents}"
    return ""


def bootstrap(
    own: np.ndarray, base: np.ndarray, tokens: np.ndarray, draws: int = DRAWS
) -> Estimate:
    """Return the mean gap of pairs in nats per token, own minus base, with its 95% interval.

    The arguments are those of `drawn_gaps`.
    """
    gap = float(((np.asarray(own) - base).sum(axis=1) / np.sum(tokens)).mean())
    found = drawn_gaps(own, base, tokens, draws=draws)
    return Estimate(gap, *central(found, (1 - CONFIDENCE) / 2), len(own))


def drawn_gaps(
    own: np.ndarray,
    base: np.ndarray,
    tokens: np.ndarray,
    paired: bool = True,
    log: bool = False,
    draws: int = DRAWS,
) -> np.ndarray:
    """Draw documents and seeds anew; return the gap of each draw, own minus base, (draws,).

    A draw takes the same documents for both arms and all seeds. It also takes the same seeds for
    both arms if runs of one seed are a pair. Each draw takes one less than there are, with
    replacement: the variance of such a mean is unbiased (Rao and Wu, 1988), which matters with few
    seeds.

    Args:
        own, base: (seeds, documents), nats summed over the tokens of each document.
        tokens: (documents,), number of tokens of each document.
        log: whether the gap is that of the logarithms of the losses.
    """
    sides = [np.asarray(side, np.float64) for side in (own, base)]
    weights = np.asarray(tokens, np.float64)
    rng, found = np.random.default_rng(0), []
    for texts in drawn_documents(rng, len(weights), draws):
        drawn = [seeds_drawn(rng, len(side), len(texts)) for side in sides[: 1 if paired else 2]]
        losses = [(texts @ side.T) / (texts @ weights)[:, None] for side in sides]
        first, second = (
            ((np.log(of_seed) if log else of_seed) * seeds).sum(axis=1)
            for of_seed, seeds in zip(losses, drawn * 2, strict=False)
        )
        found.append(first - second)
    return np.concatenate(found)


def seeds_drawn(rng: np.random.Generator, seeds: int, draws: int) -> np.ndarray:
    """Draw one seed less than there are, (draws, seeds) weights of sum 1."""
    return rng.multinomial(seeds - 1, np.full(seeds, 1 / seeds), size=draws) / (seeds - 1)


def of_documents(
    nats: np.ndarray, tokens: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float] | None:
    """Return the 95% interval of one model's mean in nats per token over documents; None with fewer
    than LEAST_OF_ONE documents.

    The percentiles are as extreme under a normal distribution as those of Student's t with n - 1
    degrees of freedom (the expanded percentile interval of Hesterberg, arXiv 1411.5279).

    Args:
        nats: (documents,), summed over the tokens of each; or the difference of two such sums.
        tokens: (documents,), number of tokens of each document.
    """
    there = np.asarray(tokens) > 0
    sums, weights = (np.asarray(x, np.float64)[there] for x in (nats, tokens))
    if len(sums) < LEAST_OF_ONE:
        return None
    from scipy.special import ndtr, stdtrit

    draw = drawn_documents(np.random.default_rng(seed), len(sums), draws)
    found = [(texts @ sums) / (texts @ weights) for texts in draw]
    return central(np.concatenate(found), float(ndtr(stdtrit(len(sums) - 1, (1 - CONFIDENCE) / 2))))


def drawn_documents(rng: np.random.Generator, documents: int, draws: int) -> Iterator[np.ndarray]:
    """Draw one document less than there are, `draws` times, in parts that fit into memory.

    Yields how often each document is drawn, (part of the draws, documents).
    """
    size = max(1, CELLS // documents)
    for start in range(0, draws, size):
        count = min(size, draws - start)
        yield rng.multinomial(documents - 1, np.full(documents, 1 / documents), size=count)


def central(found: np.ndarray, tail: float) -> tuple[float, float]:
    low, high = np.quantile(found, (tail, 1 - tail))
    return float(low), float(high)
