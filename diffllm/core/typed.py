"""Conversion of plain values from JSON or YAML to dataclasses, with type checks."""

import sys
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

from diffllm.core.errors import choose_from
from diffllm.core.files import read_json

T = TypeVar("T")

TYPES = {str: "text in quotes", float: "a number", int: "a whole number", bool: "true or false"}


def read_typed(file: Path, cls: type[T], follow: bool = False) -> T:
    """Read a JSON file as the dataclass `cls`, ignoring unknown keys.

    `follow`: whether `file` may be a symbolic link. Raises OSError if the file cannot be read.
    Raises ValueError if the file is not a regular file or has invalid content.
    """
    content = read_json(file, follow=follow)
    try:
        return made(cls, content)
    except ValueError as error:
        raise ValueError(f"is damaged: {error}") from None


def made(
    cls: type[T],
    content: Any,
    parent_key: str = "",
    strict: bool = False,
    omit: tuple[str, ...] = (),
) -> T:
    """Convert the mapping `content` of plain values to an instance of the dataclass `cls`.

    Raises ValueError if a required key is missing or a value has the wrong type.

    Args:
        parent_key: dotted key of `content` in the file, shown in errors; "" for the whole file.
        strict: raise ValueError for an unknown key, instead of ignoring the key.
        omit: names of fields of `cls` that `content` must not set; they count as unknown keys.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{parent_key or 'its content'} must be a mapping of keys to values")
    declared: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    field_by_name = {field.name: field for field in declared if field.name not in omit}
    prefix = f"{parent_key}." if parent_key else ""
    if strict:
        for key in content:
            if key not in field_by_name:
                hint = choose_from(f"{prefix}{key}", [f"{prefix}{name}" for name in field_by_name])
                raise ValueError(f"unknown key {prefix}{key}{hint}")
    # Name all missing keys before any wrong type.
    missing_keys = []
    for name, field in field_by_name.items():
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and name not in content:
            missing_keys.append(f"{prefix}{name}")
    if missing_keys:
        raise ValueError(f"{', '.join(missing_keys)} is missing")
    values = {}
    for name, field in field_by_name.items():
        if name in content:
            values[name] = typed(content[name], field.type, f"{prefix}{name}", strict)
    return cls(**values)


def without_null(declared: Any) -> Any:
    """Return T for the type T | None; return any other type unchanged."""
    kinds = get_args(declared)
    others = [kind for kind in kinds if kind is not NoneType]
    is_optional = NoneType in kinds and len(others) == 1
    return others[0] if is_optional else declared


def typed(value: Any, kind: Any, key: str, strict: bool = False) -> Any:
    """Convert a plain value to the declared type `kind` of a dataclass field.

    Supported types are dataclasses, list[T], dict[str, T], T | None, str, bool, float, int and Any,
    and the union of a dataclass, which is a mapping in the file, and another type.
    Raises ValueError if the value has the wrong type, is not finite or exceeds 64 bits.

    Args:
        key: dotted key of the value in the file, shown in errors.
        strict: raise ValueError for an unknown key of a dataclass, instead of ignoring the key.
    """
    declared = kind
    kind = without_null(declared)
    if kind is Any:
        return value
    if value is None and kind is not declared:
        return None
    if isinstance(kind, UnionType):
        is_mapping = isinstance(value, dict)
        kind = next(part for part in get_args(kind) if is_dataclass(part) == is_mapping)
    if is_dataclass(kind):
        return made(kind, value, key, strict)  # type: ignore[arg-type]
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise ValueError(f"{key}={value} must be a list")
        (inner,) = get_args(kind)
        return [typed(item, inner, f"{key}[{i}]", strict) for i, item in enumerate(value)]
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{key}={value} must be a mapping of names to values")
        for name in value:
            # YAML reads the name 1.10 as 1.1.
            if isinstance(name, bool | float):
                raise ValueError(f"{key}: the name {name} must be text in quotes")
        _, inner = get_args(kind)
        entries = {}
        for name, entry in value.items():
            entries[str(name)] = typed(entry, inner, f"{key}.{name}", strict)
        return entries
    if kind is float and isinstance(value, str):
        # YAML 1.1 reads 1e-3 as text.
        with suppress(ValueError):
            value = float(value)
    # A whole number can be written without a point.
    has_type = isinstance(value, int | float if kind is float else kind)
    # Python counts booleans as integers.
    is_other_bool = isinstance(value, bool) and kind is not bool
    if not has_type or is_other_bool:
        raise ValueError(f"{key}={value!r} must be {TYPES[kind]}")
    # `not <=` also rejects NaN.
    if kind is float and not abs(value) <= sys.float_info.max:
        raise ValueError(f"{key}={value} must be a finite number")
    if kind is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{key}={value} must be a whole number of 64 bits")
    return kind(value)
