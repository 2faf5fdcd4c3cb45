"""Parsing of commands: key=value words, flags, plain words and overrides."""

from dataclasses import dataclass

import pytest

from diffllm.cli.arguments import argument, flag, parse
from diffllm.core.errors import ConfigError


@dataclass
class Plain:
    """A command with directories."""

    run: list[str] = argument("directories", [], words="plain")
    lambda_: float | None = argument("a share", None, least=0, most=1)
    json: bool = flag("JSON")
    dry_run: bool = flag("only say")


@dataclass
class Composing:
    """A command with overrides."""

    gpus: int = argument("ranks")
    json: bool = flag("JSON")
    compare: list[str] = argument("variants", [], flag=True)
    overrides: list[str] = argument("of the config", [], words="overrides")


@pytest.mark.parametrize("word", ["--json", "json=true", "--json=true"])
def test_parse_accepts_every_spelling_of_flag(word):
    assert parse(Plain, [word], "") == Plain(json=True)
    assert parse(Composing, [word, "gpus=2"], "") == Composing(2, json=True)


def test_path_with_equals_sign_is_parsed_as_positional_argument(workplace):
    (workplace / "lr=1").mkdir()
    words = ["a", "run=b", "lr=1", "out/c=d*", "lambda=0.5", "--dry-run"]
    assert parse(Plain, words, "") == Plain(["a", "b", "lr=1", "out/c=d*"], 0.5, dry_run=True)


def test_parse_collects_unknown_arguments_as_overrides_in_order():
    words = ["model=tiny", "gpus=2", "--compare", "a,b", "--compare=c", "~x", "--other", "seed=0"]
    expected = Composing(2, False, ["a,b", "c"], ["model=tiny", "~x", "--other", "seed=0"])
    assert parse(Composing, words, "") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lambada=1"], "unknown argument 'lambada=1'; did you mean lambda=?"),
        (["--jsn"], "unknown argument '--jsn'"),
        (["json=yes"], "json='yes' must be true or false"),
        (["lambda=x"], "lambda='x' must be a number"),
        (["lambda=2"], "lambda=2.0 must be at most 1"),
    ],
)
def test_parse_error_contains_faulty_argument(words, message):
    with pytest.raises(ConfigError) as caught:
        parse(Plain, words, "")
    assert str(caught.value).startswith(message)
