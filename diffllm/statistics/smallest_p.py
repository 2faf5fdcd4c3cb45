"""Smallest p of an exact permutation test for a given number of seeds."""

import math

from diffllm.statistics.permutation import DRAWS


def smallest_p(test: str, own_seeds: int, base_seeds: int, sides: int = 1) -> float:
    """Return the p of the clearest possible result. A two-sided p is twice the one-sided p.

    Args:
        test: "paired" flips the signs of paired differences; "welch" and "log_rank" permute the
            labels of both arms.
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
    """Return the fewest seeds per arm (at least two) whose smallest p is below alpha.

    p is adjusted by the first step of Holm's correction for a family of `tests`. Return None if no
    number of seeds is enough, because a test with many seeds draws only DRAWS assignments.
    """
    n = 2
    while (p := smallest_p(test, n, n, sides)) * tests >= alpha:
        if p <= sides / (1 + DRAWS):
            return None
        n += 1
    return n
