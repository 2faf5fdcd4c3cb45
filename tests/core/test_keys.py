"""Declarations of config keys at dataclass fields."""

from dataclasses import dataclass, field, fields

import pytest

from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import ConfigError
from diffllm.core.keys import (
    UNDECLARED,
    class_declarations,
    declaration,
    declaration_of,
    declarations,
    key,
)


@dataclass
class Source:
    paths: list[str] = key(["a"], effect="order", kind="path", help="Files.")


@dataclass
class OtherSource(Source):
    paths: list[str] = field(default_factory=lambda: ["b"])
    number: int = 1


@dataclass
class Section:
    size: int = key(4, least=1, below=9, effect="speed", help="Number of items.")
    levels: dict[str, int] = key({"easy": 1}, effect="measurement", help="Levels.")
    plain: int = 3


@dataclass
class Solved:
    width: int = 3


@dataclass
class Config:
    section: Section = field(default_factory=Section)
    sources: dict[str, Source] = key({"web": Source()}, effect="order", help="Sources.")
    seed: int = key(0, effect="numbers", kind=("seed", "run"), help="Seed.")
    copy: int = key("${seed}", effect="none", resumable=False, help="Copy of the seed.")
    solved: Solved | None = key(None, effect="none", help="Computed values.")
    note: str = key("a", effect="none", compare=False, help="Note.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"effect": "result"}, "effect='result' is not one of numbers, order"),
        ({"effect": "speed", "kind": "paths"}, "kind='paths' is not one of path"),
        ({"effect": "speed", "kind": ("path", "host")}, "kind='host'"),
        ({"effect": "speed", "may_differ": "sweep"}, "may_differ='sweep'"),
        ({"effect": "speed", "minimum": 1}, "bounds='minimum' is not one of least"),
    ],
)
def test_key_with_unknown_word_raises_type_error(arguments, words):
    with pytest.raises(TypeError, match=words):
        key(1, help="A number.", **arguments)


def test_key_without_effect_or_help_raises_type_error():
    for arguments in ({"effect": "speed"}, {"help": "A number."}):
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument"):
            key(1, **arguments)


def test_each_config_has_its_own_copy_of_mutable_defaults():
    first, second = Config(), Config()
    first.section.levels["hard"] = 2
    first.sources["web"].paths.append("b")
    assert second.section.levels == {"easy": 1}
    assert second.sources["web"].paths == ["a"]


def test_declarations_contain_keys_of_nested_sections_and_entries():
    declared = declarations(Config())
    assert {"section.size", "sources", "sources.web.paths", "seed"} <= declared.keys()
    assert declared["sources.web.paths"].kinds == {"path"}
    assert declared["seed"].kinds == {"seed", "run"}
    assert declared["section.plain"] == UNDECLARED
    assert "section" not in declared
    assert declarations(Config(solved=Solved()))["solved.width"] is declared["solved"]
    of_class = class_declarations(Config)
    assert of_class.items() <= declared.items()
    assert "sources.web.paths" not in of_class


@pytest.mark.parametrize(
    ("name", "declared_by"),
    [
        ("section.levels.mqar.filler", "section.levels"),
        ("sources.web.paths", "sources.web.paths"),
        ("sources.other.weight", "sources"),
        ("section.size", "section.size"),
    ],
)
def test_longest_declared_prefix_declares_a_key(name, declared_by):
    declared = declarations(Config())
    assert declaration_of(name, declared) is declared[declared_by]


def test_field_that_replaces_a_default_has_the_declaration_of_the_base_class():
    of_class = class_declarations(OtherSource)
    assert of_class == {"paths": class_declarations(Source)["paths"], "number": UNDECLARED}
    assert declarations(OtherSource()) == of_class


def test_unknown_key_has_the_strictest_declaration():
    found = declaration_of("section.other", declarations(Config()))
    assert found == UNDECLARED
    assert (found.effect, found.resumable, found.may_differ) == ("numbers", False, frozenset())


def test_only_keys_without_effect_on_results_may_change_at_resume_by_default():
    declared = class_declarations(Config)
    resumable = {name for name, declaration in declared.items() if declaration.resumable}
    assert resumable == {"section.size", "section.levels", "solved", "note"}


def test_key_with_reference_as_default_follows_other_key():
    declared = class_declarations(Config)
    assert declared["copy"].follows == "seed"
    assert declared["note"].follows is None


def test_keys_without_comparison_do_not_make_configs_unequal():
    assert Config(note="a") == Config(note="b")
    assert Config(seed=1) != Config(seed=2)


def test_bounds_of_keys_are_checked():
    with pytest.raises(ConfigError, match=r"x\.size=9 must be less than 9"):
        check_bounds("x.", Section(size=9))
    check_bounds("x.", Section(size=8))
    size = next(config_field for config_field in fields(Section) if config_field.name == "size")
    assert declaration(size).help == "Number of items."


@dataclass
class Lists:
    sizes: list[float | None] = field(default_factory=list, metadata={"above": 0, "entries": 3})
    kind: str | None = bounded("a", choices=("a", "b"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sizes": [1, 0]}, r"sizes\[1\]=0 must be positive"),
        ({"sizes": [float("nan")]}, r"sizes\[0\]=nan must be positive"),
        ({"sizes": [1] * 4}, "number of entries in sizes is 4; the maximum is 3"),
        ({"kind": "c"}, "kind=c must be one of a, b"),
        ({"sizes": [1, None], "kind": None}, None),
    ],
)
def test_bounds_of_list_hold_for_each_entry(values, said):
    if said is None:
        check_bounds("", Lists(**values))
        return
    with pytest.raises(ConfigError, match=said):
        check_bounds("", Lists(**values))
