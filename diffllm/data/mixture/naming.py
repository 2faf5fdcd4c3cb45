"""Errors about a source of a mixture name that source."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from diffllm.core.errors import ConfigError, DataError
from diffllm.data.config import TextConfig

KEYS = "|".join(f.name for f in fields(TextConfig))
OWN = re.compile(rf"(?<![\w./-])data\.(?=(?:{KEYS})\b(?![./-]\w))")
"""Matches the prefix of a key that each source has one of, unless it is part of a path."""


@contextmanager
def of_source(name: str) -> Iterator[None]:
    """Raise a ConfigError or DataError anew, its keys as those of the source, whose name is said.

    A decorator as well.
    """
    try:
        yield
    except (ConfigError, DataError) as error:
        where = f"data.sources.{name}"
        text = OWN.sub(f"{where}.", str(error))
        named = text.startswith((f"{where}.", f"{where}:"))
        raise type(error)(text if named else f"{where}: {text}") from error
