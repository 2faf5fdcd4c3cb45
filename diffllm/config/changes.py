"""The changes of a run that goes on, and whether they were asked for."""

from typing import Any

from diffllm.errors import listed

Changes = dict[str, tuple[Any, Any]]
"""The values of changed keys by dotted key: (before, now)."""


def is_allowed(key: str, allowed: list[str]) -> bool:
    """Whether a key, or a group that it belongs to, is in `allowed`."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def described(changes: Changes) -> str:
    """Describe the first changes: 'seed: 0 there, 1 here; ...'."""
    return listed([f"{key}: {there} there, {here} here" for key, (there, here) in changes.items()])
