"""Rules that a config value keeps to by its type; the bounds of a key are at its field."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from diffllm.core.bounds import sections
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path

SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Limits of float32, in which a run computes: smaller values are 0 there, larger infinite."""
LONGEST_TEXT = 4096
FREE_TEXT = ("data.sample_prompt", "model.match_params_to", "model.match_flops_to")
"""Keys of text that is taken as it is, with line breaks; a variant's name is checked on its own."""

PATHS = re.compile(
    r"run\.dir|resume|data\.(sources\.[^.]+\.)?(paths|dataset)|data\.(cache_dir|tokenizer)"
)
"""Keys of text that is, or may be, a path."""
OF_WEIGHTS = "weights:"
"""The beginning of a value of `resume` that asks for weights alone."""


def leaves(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Iterate over (dotted key, declared type, value) of every value below a config dataclass."""
    for prefix, node in sections(config):
        hints = get_type_hints(type(node))
        for f in fields(node):
            if not is_dataclass(value := getattr(node, f.name)):
                yield f"{prefix}{f.name}", hints[f.name], value


def check_values(cfg: Any) -> None:
    """Raise ConfigError for a value that cannot mean anything under its key."""
    for key, declared, value in leaves(cfg):
        if "${" in str(value):  # reading config.yaml would resolve it
            raise ConfigError(f"{key}: a value cannot contain ${{ after interpolation")
        if get_origin(declared) is list:
            check_list(key, value, *get_args(declared))
        elif isinstance(value, str):
            check_text(key, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            check_number(key, value)


def check_paths(cfg: Any) -> None:
    """Raise ConfigError for a path that can lead nowhere on this machine.

    Of a config that a user gives; a saved one may have been made on another machine.
    """
    for key, _, value in leaves(cfg):
        if PATHS.fullmatch(key):
            for text in value if isinstance(value, list) else [value]:
                if text is not None:
                    user_path(text.removeprefix(OF_WEIGHTS), named_by(key, text))


def named_by(key: str, text: str) -> str:
    """Return the name under which a user gave a value: that of the environment's variable, where
    the key follows it."""
    from_environment = key == "data.cache_dir" and os.environ.get("DIFFLLM_CACHE") == text
    return "DIFFLLM_CACHE" if from_environment else key


def check_number(key: str, value: float) -> None:
    """Raise ConfigError for nan, infinity, and what 64-bit integers or float32 cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} must be a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key}={value} must fit into 64 bits")
    if isinstance(value, float) and value and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
        raise ConfigError(
            f"{key}={value} is not within float32: 0, or between {SMALLEST_FLOAT:.4g} and "
            f"{LARGEST_FLOAT:.4g} in size"
        )


def check_text(key: str, value: str) -> None:
    """Raise ConfigError for text that is empty, endless, or no single line of characters."""
    try:
        value.encode()
    except UnicodeEncodeError:  # bytes that the shell handed over undecoded
        raise ConfigError(f"{key}={value} is not valid UTF-8") from None
    if "\0" in value:
        raise ConfigError(f"{key}={value} must not hold a NUL character")
    if key in FREE_TEXT:
        return
    if not value.strip():
        raise ConfigError(f"{key}={value!r} must not be empty")
    if not value.isprintable():
        raise ConfigError(f"{key}={value} must be one line without control characters")
    if len(value) > LONGEST_TEXT:
        raise ConfigError(f"{key}={value[:20]}... must have at most {LONGEST_TEXT} characters")


def check_list(key: str, value: Any, kind: type) -> None:
    """Raise ConfigError for anything but a list of one kind: text of one line, or integers."""
    if not isinstance(value, list):  # an interpolation may put anything here
        raise ConfigError(f"{key}={value} must be a list")
    for item in value:
        if not isinstance(item, kind):
            raise ConfigError(f"{key}: {item!r} is not {'text' if kind is str else 'an integer'}")
        if isinstance(item, str):
            check_text(key, item)
