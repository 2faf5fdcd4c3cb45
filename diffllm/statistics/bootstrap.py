"""The gap between two arms with the error of the held-out documents and of the seeds together, and
the loss of one model with that of the documents alone.

An interval over seeds takes the held-out text as it is: other documents would have given another
gap. Here both are drawn anew.
"""

import numpy as np

from diffllm.statistics.intervals import CONFIDENCE, Estimate

DRAWS = 2000
LEAST_SEEDS = 8
"""From so many seeds on the interval covers the truth in more than 90 of 100 cases, where seeds
alone vary too; with fewer it is withheld. docs/statistics.md has the table."""
LEAST_DOCUMENTS = 20
"""Fewer documents say too little of others."""
LEAST_OF_ONE = 8
"""Fewer documents give the loss of one model no interval."""
CELLS = 4_000_000
"""Weights that are in memory at a time."""


def withheld(seeds: int, documents: int) -> str:
    """Why there is no interval from so many seeds and documents; "" if there is one."""
    if seeds < LEAST_SEEDS:
        return f"withheld: with fewer than {LEAST_SEEDS} seeds it can cover less than 90%"
    if documents < LEAST_DOCUMENTS:
        return f"withheld: it takes {LEAST_DOCUMENTS} documents, these are {documents}"
    return ""


def bootstrap(
    own: np.ndarray, base: np.ndarray, tokens: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> Estimate | None:
    """Mean gap in nats a token, own minus base, with the percentile interval over documents and
    seeds.

    A draw takes documents, the same for both arms and all seeds, and seeds, the same for both
    arms, since runs of one seed are a pair. It takes one less than there are of each: with
    replacement, the variance of such a mean is the unbiased one (Rao and Wu, 1988), which with few
    seeds matters.

    Args:
        own, base: (seeds, documents), nats of every document, summed over its tokens; row i of
            both is of one seed.
        tokens: (documents,), how many tokens these are, the same in all runs.
        draws: how many are made; deterministic given `seed`.

    Returns:
        None where `withheld` says why.
    """
    return None if withheld(*own.shape) else percentiles(own, base, tokens, draws, seed)


def percentiles(
    own: np.ndarray, base: np.ndarray, tokens: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> Estimate:
    """`bootstrap` for any number of seeds above one, however badly it covers."""
    difference = np.asarray(own, np.float64) - np.asarray(base, np.float64)
    weights = np.asarray(tokens, np.float64)
    n, documents = difference.shape
    rng, found = np.random.default_rng(seed), []
    for count in chunks(draws, documents):
        texts = drawn(rng, documents, count)
        seeds = rng.multinomial(n - 1, np.full(n, 1 / n), size=count) / (n - 1)
        by_seed = (texts @ difference.T) / (texts @ weights)[:, None]
        found.append((by_seed * seeds).sum(axis=1))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(found), (tail, 1 - tail))
    mean = float((difference.sum(axis=1) / weights.sum()).mean())
    return Estimate(mean, float(low), float(high), n)


def of_documents(
    nats: np.ndarray, tokens: np.ndarray, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float] | None:
    """Return the 95% interval of a mean in nats a token over documents of one model.

    Documents are drawn as for `bootstrap`; those without a token are left out. Percentiles lie as
    far out as Student's t with n - 1 degrees of freedom does on a normal law (the expanded
    percentile interval of Hesterberg, arXiv 1411.5279): without that 8 documents cover the truth in
    88 of 100 cases, with it in 92.

    Args:
        nats: (documents,), each summed over its tokens; or the difference of two such sums.
        tokens: (documents,), how many tokens these are.

    Returns:
        None of fewer than LEAST_OF_ONE documents.
    """
    there = np.asarray(tokens) > 0
    sums, weights = (np.asarray(x, np.float64)[there] for x in (nats, tokens))
    if len(sums) < LEAST_OF_ONE:
        return None
    from scipy.special import ndtr, stdtrit  # a third of a second that others do not need

    rng, found = np.random.default_rng(seed), []
    for count in chunks(draws, len(sums)):
        texts = drawn(rng, len(sums), count)
        found.append((texts @ sums) / (texts @ weights))
    tail = float(ndtr(stdtrit(len(sums) - 1, (1 - CONFIDENCE) / 2)))
    low, high = np.quantile(np.concatenate(found), (tail, 1 - tail))
    return float(low), float(high)


def drawn(rng: np.random.Generator, documents: int, count: int) -> np.ndarray:
    """Draw one document less than there are, `count` times: how often each, (count, documents)."""
    return rng.multinomial(documents - 1, np.full(documents, 1 / documents), size=count)


def chunks(draws: int, documents: int) -> list[int]:
    """Sizes of parts of all draws that fit into memory."""
    size = max(1, CELLS // documents)
    return [min(size, draws - start) for start in range(0, draws, size)]
