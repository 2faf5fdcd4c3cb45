"""Read YAML files that a user or a run has written. Tags and large files are rejected."""

import os
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from diffllm.core.errors import ConfigError
from diffllm.core.files import check_plain, read_text, similar_path

LARGEST_YAML = 2**20
"""Limit in bytes of a file that a user names."""
MOST_NODES = 100_000
"""Limit of keys and values in a file, with every alias expanded."""


class Loader(get_yaml_loader()):  # type: ignore[misc]
    """YAML loader that rejects tags. It reads dates and 1:30 as text, and 1e-3 as a number."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        """Compose a YAML node.

        Raises ValueError for a tag, or if the file has more than MOST_NODES keys and values.
        """
        event = self.peek_event()
        nodes_before = self.nodes
        if isinstance(event, yaml.AliasEvent):
            # The alias may be inside the value that it repeats: the expansion would not end.
            if not hasattr(self.anchors.get(event.anchor), "size"):
                raise ValueError(f"has the alias {event.anchor[:40]} before its value is complete")
            self.nodes += self.anchors[event.anchor].size
        elif event.tag:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise ValueError(f"has the tag {tag[:40]}; write the value without a tag")
        else:
            self.nodes += 1
        if self.nodes > MOST_NODES:
            raise ValueError(f"has more than {MOST_NODES:,} keys and values")
        node = super().compose_node(parent, index)
        node.size = self.nodes - nodes_before
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float | str:
        """Convert a YAML number to a Python number, and base-60 numbers such as 1:30 to text.

        Raises ValueError for a leading zero, because 010 means 8 in YAML 1.1 and 10 in YAML 1.2.
        """
        text = str(node.value)
        if ":" in text:
            return text
        try:
            return int(text, 0) if node.tag.endswith("int") else self.construct_yaml_float(node)
        except ValueError:
            raise ValueError(f"has the number {text[:40]}; use decimals, or quotes") from None


for kind in ("int", "float"):
    Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.construct_number)


def read_yaml(path: Path) -> tuple[dict[Any, Any], bytes]:
    """Return (parsed mapping, bytes of the file) for a YAML file.

    For an empty file, the mapping is {}. Raises ConfigError for a missing or invalid file.
    """
    try:
        text = read_text(path, LARGEST_YAML, follow=True)
        content = parse_yaml(text)
    except OSError as error:
        suggestion = similar_path(path, os.path.isfile)
        raise ConfigError(f"{path} cannot be read: {error.strerror}{suggestion}") from error
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from error
    if not isinstance(content, dict | None):
        raise ConfigError(f"{path} must contain a mapping of keys to values")
    return content or {}, text.encode()


def parse_yaml(text: str) -> Any:
    """Parse YAML text with `Loader`.

    Raises ValueError for invalid YAML, tags and values that `check_plain` rejects. The message
    omits the file name, for example "has the tag !!set"; callers prepend the file name.
    """
    try:
        content = Loader(text).get_single_data()
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error
    check_plain(content)
    return content
