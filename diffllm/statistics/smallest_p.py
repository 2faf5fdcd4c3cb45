"""Smallest p of an exact permutation test for a given number of seeds."""

import math

from diffllm.statistics.permutation import DRAWS


def smallest_p(test: str, own_seeds: int, base_seeds: int, sides: int = 1) -> float:
    """Return the smallest p-value that a permutation test can have with these numbers of seeds.

    A two-sided p-value is twice the one-sided p-value.

    Args:
        test: "paired" flips the signs of paired differences; "welch" and "log_rank" permute the
            labels of both arms, the runs of two variants.
        sides: 1 or 2, for a one-sided or a two-sided test.
    """
    if test == "paired":
        assignments = 2 ** min(own_seeds, base_seeds)
    elif test in ("welch", "log_rank"):
        assignments = math.comb(own_seeds + base_seeds, own_seeds)
    else:
        raise ValueError(f"test={test} must be paired, welch or log_rank")
    one_sided = 1 / assignments if assignments <= DRAWS else 1 / (1 + DRAWS)
    return min(1.0, sides * one_sided)


def seeds_for_p(test: str, alpha: float, tests: int = 1, sides: int = 1) -> int | None:
    """Return the fewest seeds per arm, at least 2, whose smallest p-value is below alpha.

    The p-value is multiplied by `tests`, the first step of Holm's correction for that many tests.
    Return None if no number of seeds is enough, because a test with many seeds draws only DRAWS
    assignments of signs or labels.
    """
    n = 2
    while (p := smallest_p(test, n, n, sides)) * tests >= alpha:
        if p <= sides / (1 + DRAWS):
            return None
        n += 1
    return n
