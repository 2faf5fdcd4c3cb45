"""Rules on config keys that may change between two launches of a run, and texts about changes."""

from collections.abc import Iterable
from typing import Any

from diffllm.core.errors import listed
from diffllm.core.keys import Declaration

Changes = dict[str, tuple[Any, Any]]
"""The values of changed keys by dotted key: (before, now)."""


def is_fixed(declared: Declaration) -> bool:
    """Return whether a key must keep its value when a run resumes."""
    return not declared.resumable


def is_of_model(declared: Declaration) -> bool:
    """Return whether a run that starts from the weights of a model takes over the key's value."""
    return declared.effect != "speed" and "run" not in declared.kinds


def is_fixed_in_stage(declared: Declaration) -> bool:
    """Return whether a key of the model must keep its value in the next stage of a training."""
    return is_of_model(declared) and "stage" not in declared.may_differ


def logs_values(declared: Declaration) -> bool:
    """Return whether a key decides the values that a run logs, or the steps of these values."""
    return is_fixed(declared) or declared.effect in ("measurement", "logging")


def changes_training(declared: Declaration) -> bool:
    """Return whether a changed key may help a run that has stopped because training diverged."""
    return declared.computes


def is_within(key: str, sections: Iterable[str]) -> bool:
    """Return whether a dotted key is one of `sections` or inside one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in sections)


def what_differs(changes: Changes) -> str:
    subject = "other plugin code" if changes.keys() == {"plugins"} else "another config"
    return f"{subject} ({changes_text(changes)})"


def changes_text(changes: Changes, origin: str = "the run") -> str:
    parts = []
    for key, (old, new) in changes.items():
        parts.append(f"{key}: {old} in {origin}, {new} in this command")
    return listed(parts)
