"""Keys of earlier versions that no longer exist, each with its replacement."""

from typing import Any, NamedTuple

from diffllm.core.errors import ConfigError


class Removed(NamedTuple):
    """A key that no longer exists."""

    default: Any
    """Its former default as config.yaml holds it: such a saved config still loads."""
    instead: str
    """What to do instead, in the imperative."""


MACHINES = "prepare a corpus on several machines with datatrove (data/README.md)"
REMOVED = {
    "data.deduplicate": Removed(False, "leave out duplicates with datatrove (data/README.md)"),
    "prepare.num_nodes": Removed(1, MACHINES),
    "prepare.node_rank": Removed(0, MACHINES),
}
"""The removed keys by dotted name; a whole section may be one entry with a mapping as default."""


def removal(key: str, detail: str = "") -> str:
    """Return the error message for a removed key, with its value or file as detail."""
    return f"{key}{detail} was removed; {REMOVED[key].instead}"


def without_removed(saved: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a saved config without removed keys that hold their default.

    Raises ConfigError for a removed key with another value.
    """
    kept = {}
    for name, value in saved.items():
        key = f"{prefix}{name}"
        if key not in REMOVED:
            kept[name] = without_removed(value, f"{key}.") if isinstance(value, dict) else value
        elif value != REMOVED[key].default:
            raise ConfigError(removal(key, f"={value}"))
    return kept
