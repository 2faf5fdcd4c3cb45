"""Checks of single config values: types of list items, text, numbers and paths."""

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from diffllm.config.run_config import CARRIED_PREFIXES
from diffllm.core.bounds import sections
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path
from diffllm.core.keys import Declaration, declarations
from diffllm.core.typed import without_null

SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Limits of float32: smaller values round to 0, larger values are infinite."""
LONGEST_TEXT = 4096


def leaves(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Iterate over all values in a config dataclass, as (dotted key, declared type, value)."""
    for prefix, node in sections(config):
        hints = get_type_hints(type(node))
        for f in fields(node):
            value = getattr(node, f.name)
            if not is_dataclass(value):
                yield f"{prefix}{f.name}", hints[f.name], value


def check_values(cfg: Any) -> None:
    """Raise ConfigError for list items of a wrong type, invalid text, or invalid numbers."""
    by_name = declarations(cfg)
    for name, declared, value in leaves(cfg):
        # Readers of config.yaml would resolve the interpolation.
        if "${" in str(value):
            raise ConfigError(
                f"{name}: the value contains ${{ after interpolation; remove ${{ from the value"
            )
        kind = without_null(declared)
        is_null = value is None and kind is not declared
        # OmegaConf does not check the type of a value that an interpolation inserts.
        if get_origin(kind) is list and not is_null:
            (item_type,) = get_args(kind)
            is_list = isinstance(value, list)
            if not is_list or not all(isinstance(item, item_type) for item in value):
                items = "text" if item_type is str else "integers"
                raise ConfigError(f"{name}={value!r} must be a list of {items}")
        for item in items_of(value):
            if isinstance(item, str):
                check_text(name, item, by_name[name])
            elif isinstance(item, int | float) and not isinstance(item, bool):
                check_number(name, item)


def items_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_paths(cfg: Any) -> None:
    """Raise ConfigError for a config value that is an invalid path.

    Do not use for saved configs, which may contain paths of another machine.
    """
    by_name = declarations(cfg)
    for name, _, value in leaves(cfg):
        if "path" not in by_name[name].kinds:
            continue
        for text in items_of(value):
            if text is None:
                continue
            path = text
            kind, _, path_after_kind = text.partition(":")
            if name == "resume" and kind in CARRIED_PREFIXES:
                path = path_after_kind
            label = name
            # The default of data.cache_dir follows a variable of the environment.
            if name == "data.cache_dir" and os.environ.get("DIFFLLM_CACHE") == text:
                label = "DIFFLLM_CACHE"
            user_path(path, label)


def check_number(key: str, value: float) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key}={value} must be from -2^63 to 2^63 - 1")
    is_in_range = value == 0 or SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT
    if isinstance(value, float) and not is_in_range:
        raise ConfigError(
            f"{key}={value} is outside the range of float32: the absolute value must be 0, or "
            f"{SMALLEST_FLOAT:.4g} to {LARGEST_FLOAT:.4g}"
        )


def check_text(key: str, value: str, declared: Declaration) -> None:
    # Python decodes the invalid bytes of a command line to surrogates.
    is_broken = any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)
    is_one_line = value.strip() and value.isprintable() and len(value) <= LONGEST_TEXT
    is_allowed = is_one_line or "text" in declared.kinds
    if is_broken or not is_allowed:
        raise ConfigError(
            f"{key}={value[:20]!r} must be one line of 1 to {LONGEST_TEXT} printable characters"
        )
