"""The one reader of YAML from users and run directories: plain values, of bounded size."""

import re
from pathlib import Path
from typing import Any

import yaml

from diffllm.errors import ConfigError
from diffllm.files import read_text
from diffllm.files.reading import check_plain

LARGEST_YAML = 2**20
"""Limit in bytes of a file that a user names."""
MOST_NODES = 100_000
"""Limit of keys and values in a file, with every alias expanded."""
LONGEST_KEY = 255
PLAIN = ("null", "bool", "merge")
INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0[0-7_]+|0x[0-9a-fA-F_]+|0b[01_]+)")
FLOAT = re.compile(
    r"""[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN)""",
    re.X,
)
"""The numbers of OmegaConf (1e-3 is one), without sexagesimal ones."""


class Loader(yaml.SafeLoader):
    """Loads null, booleans, numbers, text, lists and mappings; dates and sexagesimals are text."""

    def __init__(self, text: str, aliases: bool) -> None:
        super().__init__(text)
        self.aliases = aliases
        self.nodes = 0
        self.sizes: dict[str, int] = {}
        """Nodes below each anchor whose value is complete."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node; raises ValueError for a tag, and beyond the limits."""
        event: Any = self.peek_event()
        before = self.nodes
        if isinstance(event, yaml.AliasEvent):
            if not self.aliases:
                raise ValueError("has aliases")
            if event.anchor in self.anchors and event.anchor not in self.sizes:
                raise ValueError("has an alias inside of the value that the alias repeats")
            self.nodes += self.sizes.get(event.anchor, 0)
        elif event.tag:
            raise ValueError(f"has the tag {event.tag[:40]}; write the value without a tag")
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise ValueError(f"has more than {MOST_NODES:,} keys and values")
        node = super().compose_node(parent, index)
        if event.anchor:
            self.sizes[event.anchor] = self.nodes - before
        return node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Compose a mapping; raises ValueError for a key that is too long, or there twice."""
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError("has a list or a mapping as a key")
            if len(key.value) > LONGEST_KEY:
                raise ValueError(f"has a key of more than {LONGEST_KEY} characters")
            if key.value in keys:
                raise ValueError(f"has the key {key.value[:40]} twice")
            keys.add(key.value)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Convert a number; raises ValueError for 010, which is 8 or 10 depending on the reader."""
        try:
            return int(node.value, 0)
        except ValueError:
            raise ValueError(
                f"has the number {node.value[:40]}; write it in decimals, or text in quotes"
            ) from None


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] in PLAIN]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for name, numbers in (("int", INT), ("float", FLOAT)):
    pattern = re.compile(f"(?:{numbers.pattern})$", numbers.flags)
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", pattern, list("-+0123456789."))
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)


def read_yaml(path: Path, called: str | None = None) -> tuple[Any, bytes]:
    """Return a file's content, and its bytes; raises ConfigError: one line.

    Args:
        called: what the error names it by; its path unless given.
    """
    called = called or str(path)
    try:
        text = read_text(path, LARGEST_YAML, follow=True)
        return parse_yaml(text), text.encode()
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{called} {error}") from error


def parse_yaml(text: str, aliases: bool = True) -> Any:
    """Parse YAML of plain values; raises ValueError with words that follow a file's name.

    Args:
        aliases: whether there may be any.
    """
    try:
        content = Loader(text, aliases).get_single_data()
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error
    check_plain(content)
    return content
