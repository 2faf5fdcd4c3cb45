"""data=FILE.yaml: the recipes of the repository, and invalid files."""

import re
from pathlib import Path

import pytest

import diffllm
from diffllm.config.words import with_recipe
from diffllm.core.errors import ConfigError

RECIPES = sorted((Path(diffllm.__file__).parents[1] / "data" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_example_recipes_of_the_repository_are_valid_mixtures(path):
    cfg = diffllm.load_config([f"data={path}", "model=tiny", "steps=100"])
    cfg.data.validate()
    assert len(cfg.data.sources) > 1
    assert f"data=data/recipes/{path.name}" in path.read_text(encoding="utf-8"), (
        "the recipe must quote its command"
    )
    for source in cfg.data.sources.values():
        assert (source.source == "hub") == bool(source.dataset)


def test_command_line_arguments_override_recipe_values(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(
        'sources: {a: {weight: 2}, b: {source: files, paths: ["it\'s {a}, b.txt"]}}',
        encoding="utf-8",
    )
    words = [f"data={path}", "data.sources.a.weight=3", "data.heldout_fraction=0.1", "steps=5"]
    cfg = diffllm.load_config(words)
    assert cfg.data.sources["a"].weight == 3
    assert cfg.data.sources["b"].paths == ["it's {a}, b.txt"]
    assert cfg.resolved.choices["data"] == "mixture"


@pytest.mark.parametrize("key", ["data.sources.wiki", "data.sources.code.wieght"])
def test_command_line_override_of_unknown_recipe_key_is_refused(tmp_path, key):
    path = tmp_path / "mine.yaml"
    path.write_text("sources: {code: {weight: 2}, prose: {weight: 1}}", encoding="utf-8")
    word = f"{key}=1" if "code" in key else f"{key}.weight=1"
    with pytest.raises(ConfigError, match=rf"^unknown key {re.escape(key)}"):
        diffllm.load_config([f"data={path}", "model=tiny", "steps=1", word])


def test_recipe_with_a_single_source_is_valid(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("source: files\npaths: [a.txt]\nheldout_fraction: 1e-2\n", encoding="utf-8")
    assert with_recipe("steps=1") == ["steps=1"]
    assert with_recipe(f"data={path}") == [
        "data=files", 'data.paths=["a.txt"]', "data.heldout_fraction=0.01",
    ]  # fmt: skip
    assert diffllm.load_config([f"data={path}", "steps=1"]).data.heldout_fraction == 0.01


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is an empty file; add keys of the data config"),
        ("[]", "must contain a mapping of keys to values"),
        ("sources: [", "is not YAML"),
        ("sources: 2024-13-45", 'data.sources="2024-13-45": '),
        ("sources: '\udcff'", "is not UTF-8"),
        ("sorces: {}", "unknown key data.sorces; did you mean data.sources"),
        ("sources: {a: {wieght: 1}}", "unknown key data.sources.a.wieght"),
        ("sources: {a: 3}", "data.sources"),
        (f"sources: {dict.fromkeys(range(501), 3)}", "entries in data.sources is 501; the"),
        (f"curriculum: {[3] * 501}", "entries in data.curriculum is 501; the"),
    ],
)
def test_error_of_invalid_recipe_is_a_single_line(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text, errors="surrogateescape", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        diffllm.load_config([f"data={path}", "model=tiny", "steps=1"])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
