"""Bounds of config values, declared as metadata of dataclass fields.

Upper bounds reject mistyped numbers, which could cause integer overflow or too many processes.
"""

import operator
from collections.abc import Iterator
from dataclasses import field, fields, is_dataclass
from numbers import Integral
from typing import Any

from diffllm.core.errors import ConfigError

RULES = {
    "least": (operator.ge, "be at least"),
    "above": (operator.gt, "be greater than"),
    "most": (operator.le, "be at most"),
    "below": (operator.lt, "be less than"),
    "choices": (lambda value, options: value in options, "be one of"),
}
AT_ZERO: dict[tuple[str, Any], str] = {
    ("least", 0): "not be negative",
    ("above", 0): "be positive",
}


def bounded(default: Any, **metadata: Any) -> Any:
    """Declare a dataclass field with bounds.

    The bounds are least (>=), above (>), most (<=) and below (<). For example,
    bounded(1, least=0, below=8) declares the default 1 and the bounds 0 <= value < 8. `choices` is
    a tuple of allowed texts, and `entries` the maximum length of a list or mapping.
    """
    return field(default=default, metadata=metadata)


def at_most(items: str, count: int, most: int) -> None:
    if count > most:
        raise ConfigError(f"the number of {items} is {count:,}; the maximum is {most:,}")


def sections(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key prefix, dataclass) for `config` and for each dataclass nested in `config`.

    The key prefix is `prefix` for `config` itself, and f"{prefix}model." for `config.model`.
    """
    yield prefix, config
    for config_field in fields(config):
        name = config_field.name
        value = getattr(config, name)
        if isinstance(value, dict):
            parts = [(f"{name}.{key}", part) for key, part in value.items()]
        elif isinstance(value, list):
            parts = [(f"{name}[{i}]", part) for i, part in enumerate(value)]
        else:
            parts = [(name, value)]
        for part_name, part in parts:
            if is_dataclass(part):
                yield from sections(part, f"{prefix}{part_name}.")


def metadata_of(config_class: type, name: str) -> dict[str, Any]:
    """Return the metadata of a field of a config dataclass.

    A field without `key` also has the metadata of the field that it replaces in a base class.
    """
    metadata: dict[str, Any] = {}
    for base in config_class.__mro__:
        config_field = getattr(base, "__dataclass_fields__", {}).get(name)
        if config_field is not None:
            metadata = {**config_field.metadata, **metadata}
        if "declaration" in metadata:
            break
    return metadata


def check_bounds(prefix: str, config: Any) -> None:
    """Raise ConfigError if a field of `config` or of a nested dataclass violates its bounds.

    The bounds of a list hold for each entry. None is allowed, and NaN violates every bound.

    Args:
        prefix: text before the field names in the error, such as "model."; "" for a whole config.
    """
    for section, node in sections(config, prefix):
        for config_field in fields(node):
            value = getattr(node, config_field.name)
            metadata = metadata_of(type(node), config_field.name)
            # A field has an underscore if its name is a word of Python, such as `lambda_`.
            name = f"{section}{config_field.name.rstrip('_')}"
            if "entries" in metadata and value is not None:
                at_most(f"entries in {name}", len(value), metadata["entries"])
            entries = [(name, value)]
            if isinstance(value, list):
                entries = [(f"{name}[{i}]", entry) for i, entry in enumerate(value)]
            for rule in RULES:
                if rule not in metadata:
                    continue
                for entry_name, entry in entries:
                    check_bound(entry_name, entry, rule, metadata[rule])


def check_bound(name: str, value: Any, rule: str, bound: Any) -> None:
    if value is None:
        return
    is_within, words = RULES[rule]
    # `not is_within` instead of the opposite comparison: NaN is never within.
    if not is_within(value, bound):
        limit = ", ".join(bound) if rule == "choices" else bound
        condition = AT_ZERO.get((rule, bound), f"{words} {limit}")
        raise ConfigError(f"{name}={value} must {condition}")


def check_counts(least: int, **counts: int) -> None:
    """Raise ConfigError unless all `counts` are whole numbers of at least `least`."""
    for name, count in counts.items():
        # Integral includes the integers of NumPy; Python counts booleans as integers.
        is_whole = isinstance(count, Integral) and not isinstance(count, bool)
        if not is_whole or count < least:
            raise ConfigError(f"{name}={count!r} must be a whole number of at least {least}")


def check_rank(rank: int, world_size: int) -> None:
    check_counts(least=1, world_size=world_size)
    check_counts(least=0, rank=rank)
    if rank >= world_size:
        raise ConfigError(f"rank={rank} must be below world_size={world_size}")
