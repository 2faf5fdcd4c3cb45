"""Smallest p-value of an exact permutation test for a given number of seeds."""

import math

from diffllm.statistics.permutation import DRAWS


def smallest_p(test: str, candidate_seeds: int, base_seeds: int, sides: int = 1) -> float:
    """Return the smallest p-value that a permutation test can give for these numbers of seeds.

    Args:
        test: "paired" for permutations of signs of paired differences; "log_rank" for permutations
            that exchange runs between the two variants.
        sides: 1 or 2; a two-sided p-value is twice the one-sided p-value.
    """
    if test == "paired":
        assignments = 2 ** min(candidate_seeds, base_seeds)
    elif test == "log_rank":
        assignments = math.comb(candidate_seeds + base_seeds, candidate_seeds)
    else:
        raise ValueError(f"test={test} must be paired or log_rank")
    one_sided = 1 / assignments if assignments <= DRAWS else 1 / (1 + DRAWS)
    return min(1.0, sides * one_sided)


def seeds_for_p(test: str, alpha: float, tests: int = 1, sides: int = 1) -> int | None:
    """Return the smallest number of seeds per variant, at least 2, that permits p < `alpha`.

    Here p is the result of `smallest_p` times `tests`, the number of tests in Holm's correction.
    Return None if no number of seeds is enough. A test draws at most DRAWS permutations, so the
    result of `smallest_p` is never below `sides` / (1 + DRAWS).
    """
    n = 2
    p = smallest_p(test, n, n, sides)
    while p * tests >= alpha:
        if p <= sides / (1 + DRAWS):
            return None
        n += 1
        p = smallest_p(test, n, n, sides)
    return n
