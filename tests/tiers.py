"""Selection of test cases for the slow tier."""

from collections.abc import Collection, Iterable
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
