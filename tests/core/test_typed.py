"""Conversion of plain values to dataclasses with type checks."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs.json_files import write_json

from diffllm.core.typed import made, read_typed


@dataclass(frozen=True)
class Inner:
    size: int
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    loss: float
    parts: list[Inner]
    by_name: dict[str, Inner] = field(default_factory=dict)
    done: bool = False


GOOD = {"loss": 1, "parts": [{"size": 2, "name": None}], "by_name": {"a": {"size": 3}}}
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
)


def test_made_converts_nested_mappings_and_fills_missing_keys_with_defaults():
    assert made(Outer, GOOD) == Outer(1.0, [Inner(2)], {"a": Inner(3)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": math.nan}, "loss=nan must be a finite number"),
        ({"loss": True}, "loss=True must be a number"),
        ({"parts": [{"size": 1.0}]}, r"parts\[0\].size=1.0 must be a whole number"),
        ({"parts": [{"size": 2**63}]}, "must be a whole number of 64 bits"),
        ({"parts": [{}]}, r"parts\[0\].size is missing"),
        ({"by_name": []}, r"by_name=\[\] must be a mapping of names to values"),
        ({"by_name": {"a": {"size": 1, "name": 7}}}, "by_name.a.name=7 must be text"),
        ({"by_name": {1.1: {"size": 1}}}, "by_name: the name 1.1 must be text in quotes"),
        ({"done": 1}, "done=1 must be true or false"),
    ],
)
def test_error_from_made_mentions_key_if_value_has_wrong_type(change, message):
    with pytest.raises(ValueError, match=message):
        made(Outer, {**GOOD, **change})


def test_made_ignores_unknown_keys_unless_strict():
    content = {**GOOD, "parts": [{"size": 2, "sise": 3}]}
    assert made(Outer, content).parts == [Inner(2)]
    with pytest.raises(
        ValueError, match=r"unknown key parts\[0\].sise; did you mean parts\[0\].size"
    ):
        made(Outer, content, strict=True)


@given(st.dictionaries(st.sampled_from(["loss", "parts", "by_name", "done"]), PLAIN))
def test_made_returns_valid_dataclass_or_raises_value_error(content):
    try:
        found = made(Outer, content)
    except ValueError:
        return
    assert math.isfinite(found.loss)
    assert all(isinstance(part, Inner) for part in [*found.parts, *found.by_name.values()])


def test_read_typed_raises_error_with_key_if_value_has_wrong_type(tmp_path):
    file = tmp_path / "record.json"
    write_json(file, {**GOOD, "loss": "x"})
    with pytest.raises(ValueError, match=r"^is damaged: loss='x' must be a number$"):
        read_typed(file, Outer)
