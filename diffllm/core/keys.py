"""Declarations of config keys: effect, places where values may differ, bounds and help text.

All rules that treat config keys differently are derived from these declarations: resume, sweeps,
reports, studies, command lines and docs/configuration.md.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args, get_type_hints

from diffllm.core.bounds import RULES, metadata_of, sections

Effect = Literal["numbers", "order", "measurement", "logging", "speed", "none"]
"""Influence of a key on a run, see `EFFECTS`."""
EFFECTS: dict[Effect, str] = {
    "numbers": "the parameters that training computes",
    "order": "the tokens that each step reads",
    "measurement": "evaluated values, but not the training",
    "logging": "the steps at which values are logged",
    "speed": "time and memory; other values change only by rounding",
    "none": "names, places and messages",
}
"""Descriptions of the effects."""
Kind = Literal["path", "machine", "seed", "text", "run", "sweep"]
"""Other properties of a key.

path: the value is a path, or contains a path.
machine: the value belongs to the machine, and may differ between ranks.
seed: runs of one arm differ in this key.
text: the value may contain line breaks.
run: the value belongs to one run; a run that starts from other weights does not take it over.
sweep: a sweep sets the value.
"""
Place = Literal["report", "study", "stage"]
"""Where a key may differ although the key decides numbers, order or a measurement.

report: between compared rows of a report; the label of a row shows the value.
study: between arms, because the conditions `parameters` and `flops` limit the difference.
stage: between two stages of one training (resume=stage:PATH).
"""


@dataclass(frozen=True)
class Declaration:
    """Properties of a config key, declared by `key`.

    The default values are those of a field that a plugin declares without `key`: the strictest.
    """

    help: str = ""
    effect: Effect = "numbers"
    kinds: frozenset[Kind] = frozenset()
    fact: str | None = None
    """Entry of run.json, or config key, that is compared in place of this key."""
    may_differ: frozenset[Place] = frozenset()
    resumable: bool = False
    """Whether the value may change when a run resumes."""
    follows: str | None = None
    """Key whose value is the default of this key."""
    read_by: tuple[str, ...] = ()
    """Data sources, or scalings of RoPE, that read the key; empty: all."""
    implies: str | None = None
    """Data source that an override of this key selects."""
    auto: str | None = None
    """Interpolation that computes the value `auto`."""

    @property
    def computes(self) -> bool:
        """Whether the key affects the results of training: numbers or order."""
        return self.effect in ("numbers", "order")

    @property
    def harmless(self) -> bool:
        """Whether the key decides only speed, or only names, places and messages."""
        return self.effect in ("speed", "none")


UNDECLARED = Declaration()
KEY_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""Default of a key that follows another key."""
Declarations = Mapping[str, Declaration]
"""Declarations by dotted config key."""


def key(
    default: Any = MISSING,
    *,
    effect: Effect,
    help: str,
    kind: Kind | tuple[Kind, ...] = (),
    fact: str | None = None,
    may_differ: Place | tuple[Place, ...] = (),
    resumable: bool | None = None,
    compare: bool = True,
    read_by: tuple[str, ...] = (),
    implies: str | None = None,
    auto: str | None = None,
    **bounds: float,
) -> Any:
    """Declare a config key: a field of a config dataclass.

    Args:
        default: value without an override. Each config gets its own copy of a list or dict.
        effect: influence on a run, see `EFFECTS`.
        help: meaning and unit, for `--help` and docs/configuration.md.
        kind: further properties, see `Kind`.
        fact: entry of run.json, or config key, that is compared in place of this key.
        may_differ: places where a difference is allowed, see `Place`.
        resumable: whether the value may change when a run resumes; None: if the key decides neither
            numbers nor order.
        compare: whether configs with different values are unequal.
        read_by: data sources, or scalings of RoPE, that read the key; empty: all.
        implies: data source that an override of this key selects.
        auto: interpolation that computes the value `auto`, such as "${auto_tokens:}".
        bounds: least (>=), above (>), most (<=) and below (<), as in `core.bounds.bounded`.

    Raises TypeError for an unknown effect, kind, place or bound.
    """
    kinds = (kind,) if isinstance(kind, str) else kind
    places = (may_differ,) if isinstance(may_differ, str) else may_differ
    check_words("effect", [effect], EFFECTS)
    check_words("kind", kinds, get_args(Kind))
    check_words("may_differ", places, get_args(Place))
    check_words("bounds", bounds, RULES)
    if resumable is None:
        resumable = effect not in ("numbers", "order")
    reference = KEY_REFERENCE.fullmatch(default) if isinstance(default, str) else None
    declared = Declaration(
        help,
        effect,
        frozenset(kinds),
        fact,
        frozenset(places),
        resumable,
        follows=reference[1] if reference else None,
        read_by=read_by,
        implies=implies,
        auto=auto,
    )
    metadata = {"declaration": declared, **bounds}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: deepcopy(default), compare=compare, metadata=metadata)
    return field(default=default, compare=compare, metadata=metadata)


def check_words(name: str, words: Iterable[str], allowed: Iterable[str]) -> None:
    for word in words:
        if word not in allowed:
            raise TypeError(f"{name}={word!r} is not one of {', '.join(allowed)}")


def declaration(config_field: Field[Any]) -> Declaration:
    """Return the declaration of a dataclass field, or UNDECLARED for a field without `key`."""
    declared: Declaration = config_field.metadata.get("declaration", UNDECLARED)
    return declared


def declarations(config: Any) -> dict[str, Declaration]:
    """Return the declarations of all keys of a config dataclass, by dotted key.

    Sources of a mixture are included, for example "data.sources.web.paths". A field without `key`
    has the declaration of the mapping or dataclass that contains the field, if this is declared.
    """
    by_name: dict[str, Declaration] = {}
    for prefix, section in sections(config):
        for config_field in fields(section):
            name = f"{prefix}{config_field.name}"
            declared = declared_in(type(section), config_field.name)
            if declared is not None:
                by_name[name] = declared
            elif not is_dataclass(getattr(section, config_field.name)):
                by_name[name] = declaration_of(name, by_name)
    return by_name


@cache
def class_declarations(config_class: type, prefix: str = "") -> Declarations:
    """Return the declarations of all keys of a config class and of its nested classes."""
    hints = get_type_hints(config_class)
    by_name: dict[str, Declaration] = {}
    for config_field in fields(config_class):
        name, kind = f"{prefix}{config_field.name}", hints[config_field.name]
        if is_dataclass(kind):
            by_name |= class_declarations(kind, f"{name}.")  # type: ignore[arg-type]
        else:
            by_name[name] = declared_in(config_class, config_field.name) or UNDECLARED
    # Read-only, because the result is cached and shared.
    return MappingProxyType(by_name)


def strictest(parts: Iterable[Declarations]) -> dict[str, Declaration]:
    """Merge declarations; of several declarations of one key, keep the one with the most influence.

    Two plugins may declare a key with the same name and different effects. The order of effects is
    that of `EFFECTS`.
    """
    ranks = {effect: rank for rank, effect in enumerate(EFFECTS)}
    merged: dict[str, Declaration] = {}
    for part in parts:
        for name, declared in part.items():
            other = merged.get(name)
            if other is None or ranks[declared.effect] < ranks[other.effect]:
                merged[name] = declared
    return merged


def declared_in(config_class: type, name: str) -> Declaration | None:
    """Return the declaration of a field, or None for a field without `key`.

    A field without `key` that replaces the default of a base class has the declaration of the base.
    """
    return metadata_of(config_class, name).get("declaration")


def declaration_of(name: str, declared: Declarations) -> Declaration:
    """Return the declaration of a dotted key, or of the mapping that contains the key.

    For example, `eval.levels` declares `eval.levels.mqar.filler`. Return UNDECLARED for an unknown
    key.
    """
    while name:
        if name in declared:
            return declared[name]
        name = name.rpartition(".")[0]
    return UNDECLARED
