"""The smallest p that an exact permutation test can reach with a number of seeds."""

from diffllm.statistics import permutation


def smallest_p(test: str, own_seeds: int, base_seeds: int, sides: int = 1) -> float:
    """Return the p of the clearest result; a two-sided p is twice the one-sided p.

    Args:
        test: "paired" flips the signs of the differences of pairs, "welch" and "log_rank" permute
            the labels of both arms.
    """
    if test == "paired":
        one_sided = permutation.smallest_p(min(own_seeds, base_seeds))
    elif test in ("welch", "log_rank"):
        one_sided = permutation.smallest_p(own_seeds, base_seeds)
    else:
        raise ValueError(f"test={test} is not one of paired, welch, log_rank")
    return min(1.0, sides * one_sided)


def seeds_for_p(test: str, alpha: float, tests: int = 1, sides: int = 1) -> int | None:
    """Return the fewest seeds of each of two arms whose smallest p is below alpha, two or more.

    The p is adjusted by the first step of Holm's correction for a family of `tests`. None if not
    even a test that draws assignments, instead of listing all, reaches alpha.
    """
    n = 2
    while (p := smallest_p(test, n, n, sides)) * tests >= alpha:
        if p <= sides / (1 + permutation.DRAWS):
            return None
        n += 1
    return n
