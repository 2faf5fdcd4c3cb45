"""Selection of few test cases from a product of parameters."""

import itertools

import pytest
from tiers import pairs, variant_cases


@pytest.mark.parametrize(
    ("parameters", "most_cases"),
    [
        (["ab", [[], None]], 4),
        (["ab", [1, 2], "xy"], 5),
        (["abcd", [1, 2, 3], "xyz", [True, False]], 14),
    ],
)
def test_pairs_contain_any_two_values_of_two_parameters(parameters, most_cases):
    cases = pairs(*parameters)
    assert len(cases) <= most_cases
    for (first, one), (second, other) in itertools.combinations(enumerate(parameters), 2):
        for values in itertools.product(one, other):
            assert any((case[first], case[second]) == values for case in cases), values


def test_variant_cases_are_products_for_families_and_one_slow_case_per_ablation():
    cases = variant_cases(["gated", "gated_a", "gated_b", "plain", "plain_c"], "xy")
    slow = [case for case in cases if hasattr(case, "marks")]
    fast = [case for case in cases if case not in slow]
    assert fast == [("gated", "x"), ("gated", "y"), ("plain", "x"), ("plain", "y")]
    assert [case.values for case in slow] == [("gated_a", "x"), ("gated_b", "y"), ("plain_c", "x")]
    assert {mark.name for case in slow for mark in case.marks} == {"slow"}
