"""Selection of few test cases from a product of parameters."""

import itertools

import pytest
from tiers import pairs


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
