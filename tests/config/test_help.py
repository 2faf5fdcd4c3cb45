"""Every choice and key is described, by --help and by docs/configuration.md."""

import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
from tiers import families, slow_but

from diffllm.config.compose import compose_config, variants
from diffllm.config.help import choices, first_sentence, help_text, meanings, rows, sections_of

LONGEST = 90
"""Characters of a line that says what a key or a choice is."""


@pytest.mark.parametrize(
    "word",
    slow_but(
        [f"attention={name}" for name in families(variants())],
        [f"{group}={name}" for group, options in choices().items() for name in options],
    ),
)
def test_every_key_is_described_in_a_line_whatever_is_chosen(word):
    lines = {
        key.name: first_sentence(key.meaning)
        for section in sections_of(compose_config([word]))
        for key in section.keys
    }
    assert {"optim.lr", "model.attention.backend", "seed"} <= lines.keys()
    assert {name: line for name, line in lines.items() if not 0 < len(line) <= LONGEST} == {}


def test_every_choice_is_described_in_a_line():
    for group, options in choices().items():
        for name, line in options.items():
            assert 0 < len(line) <= LONGEST, f"{group}={name}: {line!r}"


def test_help_has_every_key_once_with_its_default_and_no_schema():
    text = help_text(["attention=gated", "seq_len=384"])
    keys = re.findall(r"^  ([a-z_.0-9]+)=(.*?)(?:  |$)", text, re.MULTILINE)
    assert len(keys) == len(dict(keys)) > 80
    defaults = dict(keys)
    assert defaults["seq_len"] == "384"
    assert defaults["model.seq_len"] == "seq_len"
    assert defaults["model.attention.gate"] == "elementwise"
    assert "model.attention.lambda_form" not in defaults
    assert "_schema" not in text
    assert re.findall(r"\S+={}", text) == ["data.sources={}", "eval.levels={}"]
    assert "run.choices" not in text


def test_help_comes_in_groups():
    text = help_text([])
    order = ["--multirun", "\nattention=diff_v2\n  diff_v1 ", "\n  seed=0 ", "\nmodel: ", "\nrun: "]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_long_lines_go_on_below_themselves():
    assert rows([("seed=0", "one two three four five six seven")], 30, column=8) == (
        "  seed=0    one two three four five six seven"
    )
    lines = rows([("steps=10", "word " * 20), ("a_long_name=1", "words")], 50, column=8)
    assert lines.splitlines()[1].startswith(" " * 12 + "word")
    assert lines.splitlines()[-2:] == ["  a_long_name=1", " " * 12 + "words"]


def test_docstrings_under_fields_are_inherited_and_may_be_replaced():
    @dataclass
    class Base:
        one: int = 1
        """The first."""
        two: int = 2
        three: int = 3
        """The third."""

    @dataclass
    class Derived(Base):
        one: int = 4
        three: int = 5
        """Another third. And more."""

    assert meanings(Base) == {"one": "The first.", "three": "The third."}
    assert meanings(Derived) == {"one": "The first.", "three": "Another third. And more."}


@pytest.mark.slow
def test_a_reader_that_has_had_enough_ends_nothing_badly():
    command = f"{sys.executable} -m diffllm train --help | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
