"""Bounds of config values: declared at their fields, checked here.

Beyond some upper bounds a number is a slip: sizes overflow, or processes and modules have no end.
"""

import operator
from dataclasses import field, fields
from typing import Any

from diffllm.errors import ConfigError

RULES = {
    "least": (operator.ge, "be at least"),
    "above": (operator.gt, "be greater than"),
    "most": (operator.le, "be at most"),
    "below": (operator.lt, "be less than"),
}
AT_ZERO = {("least", 0): "not be negative", ("above", 0): "be positive"}


def bounded(default: Any, **bounds: float) -> Any:
    """Make a dataclass field whose value keeps to `bounds`, each named by one of RULES."""
    return field(default=default, metadata=bounds)


def check_bounds(section: str, config: Any) -> None:
    """Raise ConfigError for a field of a config dataclass beyond its bounds; NaN is beyond all.

    Args:
        section: the prefix of a field's name in the message, such as "model.rope.".
    """
    for f in fields(config):
        value = getattr(config, f.name)
        for rule, bound in f.metadata.items():
            keeps, words = RULES[rule]
            if value is not None and not keeps(value, bound):
                must = AT_ZERO.get((rule, bound), f"{words} {bound}")
                raise ConfigError(f"{section}{f.name}={value} must {must}")
