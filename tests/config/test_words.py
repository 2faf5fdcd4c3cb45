"""Text keys take the words of a command line as typed, in single runs and in sweeps."""

import random
import re
import shlex
from types import UnionType
from typing import get_args

import pytest
from omegaconf import OmegaConf

from diffllm.compare.sweep.runs import combinations, split_overrides
from diffllm.config import TrainConfig, load_config
from diffllm.config.compose import compose_config
from diffllm.config.overrides import FILLED_IN
from diffllm.config.values import leaves
from diffllm.config.words import (
    as_text,
    declared_type,
    for_hydra,
    parsed_override,
    quote_text,
    quoted,
    split,
    typed_override,
    typed_text,
    unquoted,
    with_recipe,
)
from diffllm.core.errors import ConfigError


def is_text(declared: object) -> bool:
    parts = get_args(declared) if isinstance(declared, UnionType) else (declared,)
    return str in parts and set(parts) <= {str, type(None)}


DECLARED = {key: kind for key, kind, _ in leaves(TrainConfig()) if not key.startswith(FILLED_IN)}
TEXT_KEYS = [key for key, kind in DECLARED.items() if is_text(kind)]
LIST_KEYS = [key for key, kind in DECLARED.items() if kind == list[str]]
PIECES = [
    *"0123456789aBeéß_-+./~#%&@!?|<>*^;:=,'\"\\()[]{}$ ", "1.10", "2024_10_05", "12e4567", "true",
    "inf", "nan", "choice(a)", "range(1,2)", "\\'", '\\"', "a=b", "null", "漢",
]  # fmt: skip


def random_text(rng: random.Random) -> str:
    """Return a text that is neither null nor an interpolation nor already in quotes."""
    while True:
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 8)))
        if text.strip() not in ("null", "") and "${" not in text and unquoted(text) == text:
            return text


def accepted(word: str) -> str:
    """Return `word`, or the override that the error for `word` tells the user to type."""
    try:
        quote_text(word)
        return word
    except ConfigError as error:
        (advice,) = shlex.split(re.split("needs quotes: |needs brackets: ", str(error))[-1])
        return advice


def typed_item(text: str) -> str:
    """Return `text` as an item of a list or sweep, where brackets and colons need quotes."""
    return quoted(text) if {*"()[]{}:"} & {*text} else typed_text(text)


def parsed(word: str) -> object:
    return parsed_override(for_hydra(word)).value()


def test_text_key_keeps_random_text_or_its_error_shows_how_to_type_the_text(rng):
    assert {"run.name", "data.revision", "wandb.group", "resume"} < {*TEXT_KEYS}
    for _ in range(10):
        texts = {key: random_text(rng) for key in TEXT_KEYS}
        cfg = compose_config([accepted(f"{key}={text}") for key, text in texts.items()])
        assert {key: OmegaConf.select(cfg, key) for key in TEXT_KEYS} == texts


def test_printed_override_of_random_text_gives_the_text(rng):
    for _ in range(300):
        key, text = rng.choice(TEXT_KEYS), random_text(rng)
        assert parsed(typed_override(key, text)) == text
        assert unquoted(typed_text(f"'{text}'")) == f"'{text}'"


def test_list_of_text_and_mapping_keep_random_texts(rng):
    for _ in range(100):
        texts = [random_text(rng).strip() for _ in range(3)]
        typed = ", ".join(map(typed_item, texts))
        for key in LIST_KEYS:
            assert parsed(f"{key}=[{typed}]") == texts
            advised = parsed(accepted(f"{key}={texts[0]}"))
            if len(split(texts[0])) == 1:
                assert advised == texts[:1]
            else:
                assert isinstance(advised, list)
                assert all(isinstance(text, str) for text in advised)
        entry = f"{{paths: [{typed}], revision: {typed_item(texts[0])}, weight: 2}}"
        sources = {"a": {"paths": texts, "revision": texts[0], "weight": 2}}
        assert parsed(f"data.sources={{a: {entry}}}") == sources
        assert parsed(f"data.sources.a={entry}") == sources["a"]
        assert parsed(f"data.sources={as_text(sources)}") == sources


def test_sweep_over_text_key_keeps_random_texts(rng):
    for _ in range(100):
        texts = [random_text(rng).strip() for _ in range(3)]
        typed = ",".join(map(typed_item, texts))
        for values in (typed, f"choice({typed})"):
            overrides, _ = split_overrides([f"data.name={values}"])
            assert [parsed(word) for (word,) in combinations(overrides)] == texts


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("run.name=1.10", "1.10"),
        ("run.name=' 1.10'", " 1.10"),
        ('run.name="1.10"', "1.10"),
        ("run.name=null", None),
        ("run.name=NULL", "NULL"),
        ("run.name='null'", "null"),
        ("++run.name=2024_10_05", "2024_10_05"),
        ("data.sample_prompt=", ""),
        ("data.sample_prompt=def f(x): # sum\n", "def f(x): # sum\n"),
        ("data.cache_dir=/c/${seed}/(1)", "/c/0/(1)"),
        ("wandb.tags=[1.10, 2024_10,'a, b']", ["1.10", "2024_10", "a, b"]),
        ("wandb.tags=1.10", ["1.10"]),
        ("wandb.tags=", []),
        ("wandb={mode: offline, group: 1.10}", "1.10"),
    ],
)
def test_load_config_reads_text_as_typed(word, expected):
    key = "wandb.group" if word.startswith("wandb={") else word.partition("=")[0].lstrip("+")
    section, name = key.split(".")
    assert getattr(getattr(load_config(["model=tiny", word]), section), name) == expected


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("run.name=a,b", "needs quotes: 'run.name=\"a,b\"'"),
        ("data.sample_prompt=[INST] a", "needs quotes: 'data.sample_prompt=\"[INST] a\"'"),
        ("data.paths=[[a],b]", "needs quotes: 'data.paths=[\"[a]\",b]'"),
        ("data.paths=[a", "needs quotes: 'data.paths=\"[a\"'"),
        ("data.paths=a.txt,b.txt", "a list needs brackets: 'data.paths=[a.txt,b.txt]'"),
        ('data.paths=[1.10],[a(1),"b, c"]', '\'data.paths=[1.10,"a(1)","b, c"]\''),
        ("data.paths=null", "data.paths=null: must not be null"),
        ("wandb.tags=[1.10,null]", "wandb.tags=[1.10,null]: must be a list of text"),
        ("data.sources={a: {paths: [x,null]}}", "must be a list of text"),
        ("run.name='a", "needs quotes: "),
        ("run.name=choice(a)", "needs quotes: 'run.name=\"choice(a)\"'"),
        ("resume=null", "resume"),
        ("run.name=???", "run.name"),
        ("run.näme=1", "unknown key run.näme; did you mean run.name?"),
        ("optim.lr=0.1#", "optim.lr=0.1#: '0.1#' is not a number"),
        ("seed==5", "seed==5: '=5' is not an integer"),
        ("compile=wahr ü", "wahr ü"),
        ("precision=bf16#", "bf16#"),
        ("model=größe", "model=größe does not exist; choose from"),
        ("eval.levels={mqar: {filler: #}}", "brackets and quotes must balance"),
    ],
)
def test_error_for_ambiguous_or_unreadable_override_names_correction(word, named):
    with pytest.raises(ConfigError) as raised:
        load_config(["model=tiny", word])
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("data.name=1.10,1.20", ["1.10", "1.20"]),
        ("data.name='1,2', c(1)", ['"1,2"', "c(1)"]),
        ("data.name=range(1,3)", ["1", "2"]),
        ("data.name=null,'null'", ["null", '"null"']),
        ("data.paths=[1.txt,b],ü.txt", ['["1.txt","b"]', '["ü.txt"]']),
        ("hydra.launcher.partition=2024_10", []),
    ],
)
def test_sweep_splits_text_at_commas_outside_of_quotes_and_brackets(word, values):
    overrides, launcher = split_overrides([word])
    key = word.partition("=")[0]
    assert launcher == ([] if values else [word])
    assert combinations(overrides) == ([[f"{key}={value}"] for value in values] or [[]])


def test_sweep_over_text_refuses_function_that_changes_text():
    with pytest.raises(ConfigError, match="needs quotes"):
        split_overrides(["data.name=shuffle(1.10,1.20)"])


def test_launcher_keys_of_submitit_are_text_keys():
    assert declared_type("hydra.launcher.partition") is str
    assert for_hydra("hydra.launcher.account=007") == 'hydra.launcher.account="007"'


def test_recipe_path_can_be_quoted_and_contain_any_character(tmp_path):
    path = tmp_path / "ü, (1).yaml"
    path.write_text("source: files\npaths: ['a, b.txt']\n", encoding="utf-8")
    for word in (f"data='{path}'", f'data="{path}"'):
        assert with_recipe(word) == ["data=files", 'data.paths=["a, b.txt"]']
        assert load_config([word, "steps=1"]).data.paths == ["a, b.txt"]
