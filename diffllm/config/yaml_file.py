"""YAML files: a user's, and that of a run."""

from pathlib import Path
from typing import Any

import yaml

from diffllm.errors import ConfigError
from diffllm.files import read_text

LARGEST_YAML = 4 * 2**20
"""Limit in bytes."""
MOST_NODES = 100_000
"""Keys and values of a file, every alias written out."""


def read_yaml(path: Path, called: str | None = None) -> tuple[Any, bytes]:
    """Return a file's content, and its bytes; raises ConfigError: one line.

    Args:
        called: what the error names it by; its path unless given.
    """
    called = called or str(path)
    try:
        text = read_text(path, LARGEST_YAML, follow=True)
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{called} {error}") from error
    try:
        check_size(text)
        return yaml.safe_load(text), text.encode()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{called} is not YAML: {' '.join(str(error).split())}") from error


def check_size(text: str, aliases: bool = True) -> None:
    """Raise ValueError for YAML that becomes endless where its aliases are written out.

    May raise as yaml does for text that is not YAML.

    Args:
        aliases: whether there may be any.
    """
    if "&" not in text and len(text) < MOST_NODES:
        return  # without anchors there are no aliases, and a value takes at least one character
    root = yaml.compose(text, yaml.SafeLoader)
    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node) -> int:
        if id(node) in sizes:
            known = sizes[id(node)]
            if not aliases:
                raise ValueError("it has aliases")
            if known is None:
                raise ValueError("an alias stands inside of what it means")
            return known
        sizes[id(node)] = None
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        pairs = inner if isinstance(node, yaml.MappingNode) else [(each,) for each in inner]
        total = 1 + sum(size(each) for pair in pairs for each in pair)
        if total > MOST_NODES:
            raise ValueError(f"it has more than {MOST_NODES:,} keys and values")
        sizes[id(node)] = total
        return total

    if root is not None:
        size(root)
