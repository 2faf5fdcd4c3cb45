"""YAML reader: plain values load like with the former loaders, all else raises ValueError."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from diffllm.config.plugins import config_directory
from diffllm.config.yaml_file import LARGEST_YAML, parse_yaml, read_yaml
from diffllm.core.errors import ConfigError

CONF = config_directory()
RECIPES = Path(__file__).parents[2] / "data" / "recipes"
COMMITTED = sorted([*CONF.rglob("*.yaml"), *RECIPES.glob("*.yaml")])
BY_PYYAML = {RECIPES, CONF / "study"}


def with_numbers(value: Any) -> Any:
    """Convert text such as 1e-3, which PyYAML leaves as text, to a number."""
    if isinstance(value, dict):
        return {key: with_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_numbers(inner) for inner in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_read_yaml_matches_reference_parser_for_repository_yaml_files(path):
    content, text = read_yaml(path)
    if path.parent in BY_PYYAML:
        former = with_numbers(yaml.safe_load(text))
    else:
        former = OmegaConf.to_container(OmegaConf.load(path))
    assert repr(content or {}) == repr(former)


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="$"), max_size=20)
SPELT = st.sampled_from(["010", "0x1F", "1:30", "2026-11-24", "1e5", "08", "yes", "~", "=", "<<"])
KEYS = TEXT | SPELT


@given(
    st.dictionaries(
        KEYS,
        st.recursive(
            PLAIN | KEYS,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
            max_leaves=8,
        ),
        max_size=3,
    )
)
def test_parse_yaml_returns_same_values_as_saved_by_omegaconf(saved):
    assert parse_yaml(OmegaConf.to_yaml(OmegaConf.create(saved))) == saved


@pytest.mark.parametrize(
    "text", ["190:20:30", ":".join(["59"] * 3000), "2026-11-24", "2026-99-99", "08"]
)
def test_parse_yaml_returns_dates_and_base_60_numbers_as_text(text):
    assert parse_yaml(f"a: {text}") == {"a": text}


HOSTILE = {
    **dict.fromkeys(["!!int ''", "!!timestamp x", "!!bool maybe", "!own x", "! x"], "has the tag"),
    "!!python/object/apply:os.system [ls]": "has the tag",
    "010": "has the number 010",
    "1__0": "has the number 1__0",
    "9" * 5000: "has the number 999",
    "0" + "7" * 5000: "has the number 077",
    "0x" + "f" * 5000: "beyond 64 bits",
    "'\\ud800'".replace("'", '"'): "surrogate",
    "{a: 1, a: 2}": "is not YAML: .*duplicate key a",
    "{? [a] : 1}": "is not YAML: .*unhashable",
    "[" * 3000: "is nested too deeply",
    "[" * 100 + "]" * 100: "is nested too deeply",
    "*gone": "has the alias gone before",
    "&a {<<: *a}": "has the alias a before its value is complete",
}


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_parse_yaml_raises_value_error_for_unsafe_or_ambiguous_yaml(text):
    with pytest.raises(ValueError, match=HOSTILE[text]) as caught:
        parse_yaml(f"a: {text}")
    assert len(str(caught.value)) < 300


def test_read_yaml_refuses_file_above_size_limit(tmp_path):
    file = tmp_path / "large.yaml"
    file.write_text("a: " + "x" * LARGEST_YAML, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"large\.yaml has 1,048,579 bytes, more than 1,048,576"):
        read_yaml(file)
