"""What differs about a run that goes on, and whether that was asked for."""

from typing import Any

Changes = dict[str, tuple[Any, Any]]
"""By key: the value before, the value now."""


def is_allowed(key: str, allowed: list[str]) -> bool:
    """Whether a key, or a group that it belongs to, is in `allowed`."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def described(changes: Changes, most: int = 5) -> str:
    """'seed: 0 there, 1 here; ...', `most` of them."""
    parts = [f"{key}: {there} there, {here} here" for key, (there, here) in changes.items()]
    return "; ".join(parts[:most] + ["..."] * (len(parts) > most))
