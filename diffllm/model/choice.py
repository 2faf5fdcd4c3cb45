"""A decision that the device takes, kept with its reason for whoever reads about the run."""

from typing import Any, NamedTuple

ASKED = "asked for"
"""The reason of a choice that the config made."""


class Choice(NamedTuple):
    """A setting that was left to the device, and why it came out as it did."""

    value: Any
    reason: str
    """A short phrase that stands behind the value in brackets, e.g. "asked for"."""
