"""Descriptions of all choices and keys, in --help and docs/configuration.md."""

import re

import pytest
from tiers import families

from diffllm.config.compose import compose_config, variants
from diffllm.config.help import choices, first_sentence, help_text, sections_of

LONGEST = 90
"""Maximum characters of the description of a key or a choice."""


@pytest.mark.parametrize("variant", families(variants()))
def test_every_config_key_has_a_short_description(variant):
    """Only attention variants have different keys; an ablation has the keys of its family."""
    lines = {
        key.name: first_sentence(key.meaning)
        for section in sections_of(compose_config([f"attention={variant}"]))
        for key in section.keys
    }
    assert {"optim.lr", "model.attention.backend", "seed"} <= lines.keys()
    assert {name: line for name, line in lines.items() if not 0 < len(line) <= LONGEST} == {}


def test_every_config_group_option_has_a_short_description():
    for group, options in choices().items():
        for name, line in options.items():
            assert 0 < len(line) <= LONGEST, f"{group}={name}: {line!r}"


def test_train_help_contains_every_config_key_exactly_once():
    text = help_text(["attention=gated", "seq_len=384"])
    keys = re.findall(r"^  ([a-z_.0-9]+)=(.*?)(?:  |$)", text, re.MULTILINE)
    assert len(keys) == len(dict(keys)) > 80
    defaults = dict(keys)
    assert defaults["seq_len"] == "384"
    assert defaults["model.seq_len"] == "seq_len"
    assert defaults["model.attention.gate"] == "elementwise"
    assert "model.attention.lambda_form" not in defaults
    assert "_schema" not in text
    assert re.findall(r"\S+={}", text) == [
        "data.sources={}",
        "data.document_lengths={}",
        "eval.levels={}",
    ]
    assert "resolved.choices" not in text
