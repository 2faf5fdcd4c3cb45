"""A setting that the device decides, kept with its reason for whoever reads about the run."""

from typing import Any, NamedTuple

ASKED = "asked for"
"""The reason of a setting that the config decided."""


class Choice(NamedTuple):
    """The value of a setting that was left to the device, and the reason for it."""

    value: Any
    reason: str
    """A short phrase that is shown behind the value in brackets, e.g. "asked for"."""
