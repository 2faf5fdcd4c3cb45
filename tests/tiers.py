"""Selection of test cases: cases of the slow tier, and few cases of many parameters."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return values for `parametrize`; mark all values slow that are not in `fast`."""
    cases = list(cases)
    assert all(case in cases for case in fast), f"{fast} are not all among {cases}"
    return [
        case
        if case in fast
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def families(variants: Iterable[str]) -> list[str]:
    """Return variants without ablations; `diff_v2_no_lambda` is an ablation of `diff_v2`."""
    names = list(variants)
    return [name for name in names if not any(name.startswith(f"{other}_") for other in names)]


def variant_cases(variants: Iterable[str], *parameters: Sequence[Any]) -> list[Any]:
    """Return cases (variant, value of each parameter); cases of ablations are slow.

    Families take all combinations of values. Each ablation takes only the next combination, because
    it shares the code of its family.
    """
    names = list(variants)
    combinations = list(itertools.product(*parameters))
    fast = [(name, *values) for name in families(names) for values in combinations]
    ablations = [name for name in names if name not in families(names)]
    slow = list(zip(ablations, itertools.cycle(combinations)))
    return slow_but(fast, [*fast, *((name, *values) for name, values in slow)])


def pairs(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few cases in which any two values of two parameters occur together at least once.

    The cases are a subset of the product of the parameters. They are the same in every process.
    """
    product = list(itertools.product(*(range(len(values)) for values in parameters)))
    missing = set().union(*map(_pairs_in, product))
    cases = []
    while missing:
        indices = max(product, key=lambda case: len(missing & _pairs_in(case)))
        missing -= _pairs_in(indices)
        case = [values[index] for values, index in zip(parameters, indices, strict=True)]
        cases.append(tuple(case))
    return cases


def _pairs_in(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), 2))
